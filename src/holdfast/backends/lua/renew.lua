-- Extends a hold that is still its owner's. ARGV: owner, ttl ms. Answers 1, or 0 if it is gone.
local call = redis.call
local time = call('TIME')
local now = time[1] * 1000 + (time[2] - time[2] % 1000) / 1000
local s = call('HMGET', KEYS[1], 'v', 'x', 'xe', 'e')
if s[1] and s[1] ~= VERSION then return {'incompatible', s[1]} end
local ttl = tonumber(ARGV[2])
local until_ms = now + math.max(ttl, KEEP)
if s[2] == ARGV[1] and tonumber(s[3]) > now then
  if INTEROP then
    if call('GET', KEYS[5]) ~= ARGV[1] then return 0 end
    call('PEXPIRE', KEYS[5], ttl)
  end
  call('HSET', KEYS[1], 'xe', now + ttl)
else
  local ends = call('ZSCORE', KEYS[3], ARGV[1])
  if not ends or tonumber(ends) <= now then return 0 end
  call('ZADD', KEYS[3], now + ttl, ARGV[1])
  call('PEXPIRE', KEYS[3], until_ms - now + DAY)
end
if not s[4] or until_ms > tonumber(s[4]) then
  call('PEXPIRE', KEYS[1], until_ms - now + DAY)
  call('HSET', KEYS[1], 'e', until_ms + DAY)
end
return 1
