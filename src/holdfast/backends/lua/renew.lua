-- Extends a hold that is still its owner's. ARGV: owner, ttl ms, 1 to let it end sooner than now
-- stored: else a later end stays, since this may arrive late. Answers 1, or 0 if it is gone.
local call = redis.call
local time = call('TIME')
local now = time[1] * 1000 + (time[2] - time[2] % 1000) / 1000
local s = call('HMGET', KEYS[1], 'v', 'x', 'xe', 'e', 'n')
if s[1] and s[1] ~= VERSION then return {'incompatible', s[1]} end
local ttl = tonumber(ARGV[2])
local function later_of(stored)
  return ARGV[3] == '1' and now + ttl or math.max(tonumber(stored), now + ttl)
end
if s[2] == ARGV[1] and tonumber(s[3]) > now then
  local renewed = later_of(s[3])
  if INTEROP then
    if call('GET', KEYS[2]) ~= ARGV[1] then return 0 end
    call('PEXPIRE', KEYS[2], renewed - now)
  end
  call('HSET', KEYS[1], 'xe', renewed)
else
  local entry = s[5] and call('HGET', KEYS[1], 'h:' .. ARGV[1])
  if not entry then return 0 end
  local front, ends, rest = string.match(entry, '^(%a %d+) (%d+) (.*)$')
  if tonumber(ends) <= now then return 0 end
  local renewed = later_of(ends)
  call('HSET', KEYS[1], 'h:' .. ARGV[1], front .. ' ' .. string.format('%.0f', renewed) .. ' ' .. rest)
  if tonumber(call('HGET', KEYS[1], 'f')) > renewed then call('HSET', KEYS[1], 'f', renewed) end
end
local until_ms = now + math.max(ttl, KEEP)
if not s[4] or until_ms > tonumber(s[4]) then
  call('HSET', KEYS[1], 'e', until_ms + DAY)
  call('PEXPIRE', KEYS[1], until_ms - now + DAY)
end
return 1
