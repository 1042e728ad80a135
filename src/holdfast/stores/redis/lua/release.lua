-- The usual ways of an exclusive hold to end: nobody waits, or the first in line is exclusive too
-- and there to be woken. All else is `state`.
-- ARGV: owner. Answers 1 if the hold was still this owner's.
local call = redis.call
local time = call('TIME')
local now = time[1] * 1000 + (time[2] - time[2] % 1000) / 1000
if not INTEROP then
  local s = call('HMGET', KEYS[1], 'v', 'x', 'xe', 'w', 'i', 't')
  local ends = tonumber(s[3] or '')
  if s[1] == VERSION and s[2] == ARGV[1] and ends then
    if not s[4] then
      call('HDEL', KEYS[1], 'x', 'xe', 'xl')
      return ends > now and 1 or 0
    end
    local waiting, first, last = tonumber(s[4]), tonumber(s[5] or ''), tonumber(s[6] or '')
    local owner = first and call('HGET', KEYS[1], 'l:' .. s[5])
    local entry = owner and call('HGET', KEYS[1], 'w:' .. owner)
    if entry and ends > now and waiting and waiting > 0 and last and last < MOST then
      local front, refreshed, rest, handed, channel, label =
        string.match(entry, '^(%d+ x 1 (%d+)) 0( %d+ %d+ (%d+) (%S+) (.*))$')
      if front and refreshed + STALE >= now then
        local key = string.sub(redis.sha1hex(owner), 1, 16)
        local heard = channel ~= '-' and listeners(channel) > 0
        local reserved = front .. ' ' .. string.format('%.0f', now + GRACE) .. rest
        -- Granted with the wake-up, if somebody hears it, and for no longer than one who waits is
        -- taken to be well without a word: who is well renews it, or asks for it again. It is
        -- written before it is told: a server that does not let it be written tells nobody.
        if heard and DIRECT and handed ~= '0' then  -- by the options of both clients
          local token = string.format('%.0f', math.max(last + 1, time[1] * 1000000 + time[2]))
          local its_end = now + math.min(tonumber(handed), STALE)
          if waiting == 1 then
            call('HDEL', KEYS[1], 'w:' .. owner, 'l:' .. s[5], 'w', 'i')
            call('HSET', KEYS[1], 't', token, 'x', owner, 'xe', its_end, 'xl', label)
          else
            call('HDEL', KEYS[1], 'w:' .. owner, 'l:' .. s[5])
            call('HSET', KEYS[1], 't', token, 'x', owner, 'xe', its_end, 'xl', label,
              'w', waiting - 1, 'i', first + 1)
          end
          local told = redis.pcall('PUBLISH', channel, key .. ' ' .. token)
          if type(told) == 'number' and told > 0 then return 1 end
          -- Nobody heard of it (this user may not publish there): back into the line with it.
          call('HDEL', KEYS[1], 'x', 'xe', 'xl')
          call('HSET', KEYS[1], 'w:' .. owner, reserved, 'l:' .. s[5], owner, 'w', waiting, 'i', first)
          return 1
        end
        if heard or channel == '-' or CLUSTER then
          call('HDEL', KEYS[1], 'x', 'xe', 'xl')
          call('HSET', KEYS[1], 'w:' .. owner, reserved)
          if channel ~= '-' then redis.pcall('PUBLISH', channel, key) end
          return 1
        end
      end
    end
  end
end
