-- The usual releases of an exclusive hold: the queue is empty, or the first waiter is exclusive too
-- and can be woken. `state` does all other cases.
-- ARGV: owner. Returns 1 if this owner still held the lock.
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
      local front, refreshed, rest, direct_ms, channel, label =
        string.match(entry, '^(%d+ x 1 (%d+)) 0( %d+ %d+ (%d+) (%S+) (.*))$')
      if front and refreshed + STALE >= now then
        local key = string.sub(redis.sha1hex(owner), 1, 16)
        local listening = channel ~= '-' and listeners(channel) > 0
        local reserved = front .. ' ' .. string.format('%.0f', now + GRACE) .. rest
        -- Direct grant with the wake-up, if the waiter's client is subscribed. It lasts at most
        -- STALE ms, after which a waiter without refresh counts as gone: a live waiter renews it or
        -- attempts again. It is written before it is published: if the server refuses the write,
        -- nothing is published.
        if listening and DIRECT and direct_ms ~= '0' then  -- by the options of both clients
          local token = string.format('%.0f', math.max(last + 1, time[1] * 1000000 + time[2]))
          local its_end = now + math.min(tonumber(direct_ms), STALE)
          if waiting == 1 then
            call('HDEL', KEYS[1], 'w:' .. owner, 'l:' .. s[5], 'w', 'i')
            call('HSET', KEYS[1], 't', token, 'x', owner, 'xe', its_end, 'xl', label)
          else
            call('HDEL', KEYS[1], 'w:' .. owner, 'l:' .. s[5])
            call('HSET', KEYS[1], 't', token, 'x', owner, 'xe', its_end, 'xl', label,
              'w', waiting - 1, 'i', first + 1)
          end
          local receivers = redis.pcall('PUBLISH', channel, key .. ' ' .. token)
          if type(receivers) == 'number' and receivers > 0 then return 1 end
          -- Not delivered (this user may not publish there): put the waiter back into the queue.
          call('HDEL', KEYS[1], 'x', 'xe', 'xl')
          call('HSET', KEYS[1], 'w:' .. owner, reserved, 'l:' .. s[5], owner, 'w', waiting, 'i', first)
          return 1
        end
        if listening or channel == '-' or CLUSTER then
          call('HDEL', KEYS[1], 'x', 'xe', 'xl')
          call('HSET', KEYS[1], 'w:' .. owner, reserved)
          if channel ~= '-' then redis.pcall('PUBLISH', channel, key) end
          return 1
        end
      end
    end
  end
end
