-- All that is known about a name, and the rules: what runs out, who fits, who is woken.
-- A name's state is one hash:
--   v protocol version   t last token   k limit (0: a lock)   e when its key runs out
--   x xe xl              the exclusive holder: owner, end, label
--   h:OWNER n b          shared and slots holders, their weight, the slots as text of 0 and 1
--   w:OWNER w q          those in line, how many, the last number in line
--   d                    until when abandoned owners are remembered
-- beside it: `line` (owner by number), `held` (owner by end), `gone` (owner by when it abandoned).
-- Times are in ms, tokens in µs: both whole in a Lua number, and redis.call writes them out whole.
local state, line, held, gone = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local s = call('HMGET', state, 'v', 't', 'k', 'x', 'xe', 'n', 'b', 'w', 'd', 'e')
local version, token, limit = s[1], tonumber(s[2]) or 0, s[3] or '0'
local x, ends = s[4], tonumber(s[5]) or 0
local n, slots = tonumber(s[6]) or 0, s[7] or ''
local waiting = tonumber(s[8]) or 0
local n_stored, slots_stored, waiting_stored = n, slots, waiting

if version and version ~= VERSION then
  return {'incompatible', version}
end

local function whole(number)
  return string.format('%.0f', number)
end

-- Keys outlive what they hold, and names that nobody uses go in the end.
local function keep(ttl)
  local until_ms = now + math.max(ttl, KEEP)
  if not s[10] or until_ms > tonumber(s[10]) then
    call('PEXPIRE', state, until_ms - now + DAY)
    return until_ms + DAY
  end
  return s[10]
end

-- Writes what changed in passing.
local function save()
  if n ~= n_stored or slots ~= slots_stored then
    if n > 0 then call('HSET', state, 'n', n, 'b', slots) else call('HDEL', state, 'n', 'b') end
  end
  if waiting ~= waiting_stored then
    if waiting > 0 then call('HSET', state, 'w', waiting) else call('HDEL', state, 'w') end
  end
  n_stored, slots_stored, waiting_stored = n, slots, waiting
end

local function read_hold(owner)
  local entry = call('HGET', state, 'h:' .. owner)
  if entry then return string.match(entry, '^(%a) (%d+) (%d+) (%S+) (.*)$') end
end

-- Ends a hold and gives its token, or nil if there was none.
local function drop(owner)
  if INTEROP and call('GET', KEYS[5]) == owner then call('DEL', KEYS[5]) end
  if x == owner then
    local alive = ends > now
    call('HDEL', state, 'x', 'xe', 'xl')
    x = false
    return alive and token or nil
  end
  if n == 0 or call('ZREM', held, owner) == 0 then return nil end
  local _, weight, its_token, taken = read_hold(owner)
  call('HDEL', state, 'h:' .. owner)
  n = n - weight
  if n == 0 then slots = '' end
  for slot in string.gmatch(n > 0 and taken or '', '%d+') do
    slots = string.sub(slots, 1, slot) .. '0' .. string.sub(slots, slot + 2)
  end
  return tonumber(its_token)
end

local function expire()
  if x and ends <= now then drop(x) end
  if n > 0 then
    for _, owner in ipairs(call('ZRANGEBYSCORE', held, '-inf', now)) do drop(owner) end
  end
end

local function leave(owner)
  waiting = waiting - call('ZREM', line, owner)
  call('HDEL', state, 'w:' .. owner)
end

local function read_wait(owner)
  local entry = call('HGET', state, 'w:' .. owner)
  if entry then
    return string.match(entry, '^(%a) (%d+) (%d+) (%d+) (%d+) (%d+) (%S+) (.*)$')
  end
end

local function write_wait(owner, mode, weight, refreshed, reserved, behind, since, channel, label)
  call('HSET', state, 'w:' .. owner, mode .. ' ' .. weight .. ' ' .. whole(refreshed) .. ' '
    .. whole(reserved) .. ' ' .. behind .. ' ' .. since .. ' ' .. channel .. ' ' .. label)
end

-- What holders take, and then those in line: whoever stands in front counts as if it held.
local capacity, weights, anybody, alone
local function count_holders()
  capacity, weights = tonumber(limit), n
  anybody, alone = x or n > 0, x
end

local function fits(mode, weight)
  if mode == 'x' then return not anybody end
  if mode == 's' then return not alone end
  return weights + weight <= capacity
end

local function take(mode, weight)
  anybody, weights = true, weights + weight
  if mode == 'x' then alone = true end
end

local function full()
  if capacity > 0 then return weights >= capacity end
  return alone
end

-- Whether somebody was there to hear it. Waiters that do not listen yet attempt again soon.
local function wake(owner, channel)
  if channel == '-' then return true end
  return call('PUBLISH', channel, string.sub(redis.sha1hex(owner), 1, 16)) > 0 or CLUSTER
end

-- Goes along the line while claims fit: reserves for them, wakes them, skips who is gone.
-- Tells whether `me` fits in its place, and whether somebody who does not fit was met.
local soonest
local function settle(me, my_mode, my_weight)
  local admitted, kept, size = false, 0, 4
  soonest = nil
  count_holders()
  while waiting > 0 and not full() do
    local page = call('ZRANGE', line, kept, kept + size - 1)
    if #page == 0 then
      if kept == 0 then waiting = 0 end
      break
    end
    size = math.min(size * 4, 256)
    for _, owner in ipairs(page) do
      local mode, weight, refreshed, reserved, behind, since, channel, label
      local here = true
      if owner == me then
        mode, weight = my_mode, my_weight
      else
        mode, weight, refreshed, reserved, behind, since, channel, label = read_wait(owner)
        reserved = tonumber(reserved)
        here = mode and (reserved == 0 or reserved >= now) and refreshed + STALE >= now
      end
      if here and not fits(mode, weight) then return admitted, true end
      if here and owner == me then
        admitted = true
      elseif here and reserved == 0 then
        reserved = now + GRACE
        here = wake(owner, channel)
        if here then
          write_wait(owner, mode, weight, refreshed, reserved, behind, since, channel, label)
        end
      end
      if here then
        take(mode, weight)
        kept = kept + 1
        if reserved and (not soonest or reserved < soonest) then soonest = reserved end
        if full() then return admitted, false end
      else
        leave(owner)
      end
    end
  end
  return admitted, false
end
