-- The usual ways of an exclusive hold to end: nobody waits, or the first in line is exclusive too
-- and there to be woken. All else is `state`.
-- ARGV: owner. Answers 1 if the hold was still this owner's.
local call = redis.call
local time = call('TIME')
local now = time[1] * 1000 + (time[2] - time[2] % 1000) / 1000
if not INTEROP then
  local s = call('HMGET', KEYS[1], 'v', 'x', 'xe', 'w', 'i', 't')
  if s[1] == VERSION and s[2] == ARGV[1] then
    if not s[4] then
      call('HDEL', KEYS[1], 'x', 'xe', 'xl')
      return tonumber(s[3]) > now and 1 or 0
    end
    local owner = call('HGET', KEYS[1], 'l:' .. s[5])
    local entry = owner and call('HGET', KEYS[1], 'w:' .. owner)
    if entry and tonumber(s[3]) > now then
      local front, refreshed, rest, handed, channel, label =
        string.match(entry, '^(%d+ x 1 (%d+)) 0( %d+ %d+ (%d+) (%S+) (.*))$')
      local key = owner and string.sub(redis.sha1hex(owner), 1, 16)
      if front and refreshed + STALE >= now then
        -- Granted with the wake-up, if somebody hears it, and for no longer than one who waits is
        -- taken to be well without a word: who is well renews it, or asks for it again.
        local token = string.format('%.0f', math.max(s[6] + 1, time[1] * 1000000 + time[2]))
        local told = DIRECT and handed ~= '0'  -- by the options of both doors
        if told and channel ~= '-' and call('PUBLISH', channel, key .. ' ' .. token) > 0 then
          if s[4] == '1' then
            call('HDEL', KEYS[1], 'w:' .. owner, 'l:' .. s[5], 'w', 'i')
            call('HSET', KEYS[1], 't', token, 'x', owner, 'xe', now + handed, 'xl', label)
          else
            call('HDEL', KEYS[1], 'w:' .. owner, 'l:' .. s[5])
            call('HSET', KEYS[1], 't', token, 'x', owner, 'xe', now + handed, 'xl', label,
              'w', s[4] - 1, 'i', s[5] + 1)
          end
          return 1
        end
        if channel == '-' or not told and call('PUBLISH', channel, key) > 0 or CLUSTER then
          call('HDEL', KEYS[1], 'x', 'xe', 'xl')
          call('HSET', KEYS[1], 'w:' .. owner,
            front .. ' ' .. string.format('%.0f', now + GRACE) .. rest)
          return 1
        end
      end
    end
  end
end
