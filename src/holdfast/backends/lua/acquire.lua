-- Takes a free name for an exclusive claim with one read and one write; all else is `attempt`.
-- KEYS: state, then what flags add
-- ARGV: owner, label, sent µs, ttl ms, shape: mode, weight, limit, join, max ttl ms, channel
local call = redis.call
local time = call('TIME')
local now = time[1] * 1000 + (time[2] - time[2] % 1000) / 1000
if not LOSS and not INTEROP and string.sub(ARGV[5], 1, 1) == 'x' then
  local s = call('HMGET', KEYS[1], 'v', 't', 'x', 'xe', 'n', 'w', 'd', 'k', 'e')
  if s[1] == VERSION and s[2] and s[8] == '0' and not s[5] and not s[6]
    and (not s[3] or tonumber(s[4]) <= now)
    and (not s[7] or tonumber(s[7]) <= now)
    and s[9] and now + math.max(tonumber(ARGV[4]), KEEP) <= tonumber(s[9])
  then
    local token = math.max(s[2] + 1, time[1] * 1000000 + time[2])
    call('HSET', KEYS[1], 't', token, 'x', ARGV[1], 'xe', now + ARGV[4], 'xl', ARGV[2])
    return token
  end
end
