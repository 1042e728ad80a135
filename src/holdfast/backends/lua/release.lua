-- Ends an exclusive hold that nobody waits for with one read and one write.
-- ARGV: owner. Answers 1 if the hold was still this owner's.
local call = redis.call
local time = call('TIME')
local now = time[1] * 1000 + (time[2] - time[2] % 1000) / 1000
if not INTEROP then
  local s = call('HMGET', KEYS[1], 'v', 'x', 'xe', 'w')
  if s[1] == VERSION and s[2] == ARGV[1] and not s[4] then
    call('HDEL', KEYS[1], 'x', 'xe', 'xl')
    return tonumber(s[3]) > now and 1 or 0
  end
end
