-- Hands an exclusive hold on inside a door, where nobody else waits.
-- ARGV: the owner who releases, then a claim. Answers {1 if it was still its, answer}.
local call = redis.call
local time = call('TIME')
local now = time[1] * 1000 + (time[2] - time[2] % 1000) / 1000
if not LOSS and not INTEROP and string.sub(ARGV[6], 1, 1) == 'x' then
  local s = call('HMGET', KEYS[1], 'v', 't', 'x', 'xe', 'w', 'd', 'e')
  if s[1] == VERSION and s[3] == ARGV[1] and tonumber(s[4]) > now and not s[5]
    and (not s[6] or tonumber(s[6]) <= now)
    and s[7] and now + math.max(tonumber(ARGV[5]), KEEP) <= tonumber(s[7])
  then
    local token = math.max(s[2] + 1, time[1] * 1000000 + time[2])
    call('HSET', KEYS[1], 't', token, 'x', ARGV[2], 'xe', now + ARGV[5], 'xl', ARGV[3])
    return {1, token}
  end
end
