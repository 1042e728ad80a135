-- The usual ways of an exclusive hold to end: nobody waits, or the first in line is exclusive too
-- and there to be woken. All else is `state`.
-- ARGV: owner. Answers 1 if the hold was still this owner's.
local call = redis.call
local time = call('TIME')
local now = time[1] * 1000 + (time[2] - time[2] % 1000) / 1000
if not INTEROP then
  local s = call('HMGET', KEYS[1], 'v', 'x', 'xe', 'w', 'i')
  if s[1] == VERSION and s[2] == ARGV[1] then
    if not s[4] then
      call('HDEL', KEYS[1], 'x', 'xe', 'xl')
      return tonumber(s[3]) > now and 1 or 0
    end
    local owner = call('HGET', KEYS[1], 'l:' .. s[5])
    local entry = owner and call('HGET', KEYS[1], 'w:' .. owner)
    if entry and tonumber(s[3]) > now then
      local front, refreshed, rest, channel =
        string.match(entry, '^(%d+ x 1 (%d+)) 0( %d+ %d+ (%S+) .*)$')
      if front and refreshed + STALE >= now and (channel == '-'
        or call('PUBLISH', channel, string.sub(redis.sha1hex(owner), 1, 16)) > 0 or CLUSTER)
      then
        call('HDEL', KEYS[1], 'x', 'xe', 'xl')
        call('HSET', KEYS[1], 'w:' .. owner,
          front .. ' ' .. string.format('%.0f', now + GRACE) .. rest)
        return 1
      end
    end
  end
end
