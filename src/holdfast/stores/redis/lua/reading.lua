-- Reads numbers that are stored. They are whole and below 2^53: past that a number of Lua's no longer
-- grows by one. Anything else ends the script, before it has written anything.
local function damaged(what)
  error('DAMAGED ' .. what .. ';', 0)
end

local function number(text, what)
  local value = #text <= 16 and not string.find(text, '%D') and tonumber(text)
  if not value or value > MOST then damaged(what .. ' is not a number below 2^53') end
  return value
end

local function next_token(last, micros)
  if last >= MOST then damaged('its tokens have reached 2^53, and would repeat from here on') end
  return math.max(last + 1, micros)
end

-- How many listen to a channel. A user who may not ask is answered 1: somebody is taken to listen.
local function listeners(channel)
  return redis.pcall('PUBSUB', 'NUMSUB', channel)[2] or 1
end

-- A label longer than any client of ours writes is not shown.
local function shown(label)
  return #label <= LABEL_BYTES and label or ''
end
