-- Reads stored numbers. They are whole and below 2^53: above that, a Lua number no longer grows by
-- one. Anything else ends the script with an error, before it has written anything.
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

-- The number of subscribers of a channel; 1 if this user may not run PUBSUB, so that waiters are woken.
local function listeners(channel)
  return redis.pcall('PUBSUB', 'NUMSUB', channel)[2] or 1
end

-- A label that is longer than any client writes is not shown.
local function shown(label)
  return #label <= LABEL_BYTES and label or ''
end
