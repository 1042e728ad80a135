-- The usual cases of an exclusive claim, in as few commands as possible: the name is free; or it is
-- held, and the claim joins the queue; or the claim was woken as the first in the queue. All other
-- cases, and the rules, are in `state` and `attempt`; damaged numbers are reported there.
-- KEYS: state, then the keys that the options add
-- ARGV: owner, label, sent µs, ttl ms, shape: mode, weight, limit, join, max ttl ms,
-- ms of a direct grant (0: none), channel
local call = redis.call
local time = call('TIME')
local now = time[1] * 1000 + (time[2] - time[2] % 1000) / 1000
if not LOSS and not INTEROP and string.sub(ARGV[5], 1, 1) == 'x' then
  local owner = ARGV[1]
  local s = call('HMGET', KEYS[1], 'v', 't', 'x', 'xe', 'n', 'w', 'd', 'k', 'e', 'i', 'q')
  local last, ends = tonumber(s[2] or ''), tonumber(s[4] or 0)
  local keeps_until, abandons_until = tonumber(s[9] or ''), tonumber(s[7] or 0)
  local waiting, first, number = tonumber(s[6] or 0), tonumber(s[10] or 1), tonumber(s[11] or 0)
  if s[1] == VERSION and s[8] == '0' and not s[5] and last and last < MOST
    and ends and ends <= MOST
    and abandons_until and abandons_until <= now
    and keeps_until and now + math.max(tonumber(ARGV[4]), KEEP) <= keeps_until
    and waiting and first and number and number < MOST
  then
    local micros = time[1] * 1000000 + time[2]
    if not s[6] and (not s[3] or ends <= now) then
      local token = math.max(last + 1, micros)
      call('HSET', KEYS[1], 't', token, 'x', owner, 'xe', now + ARGV[4], 'xl', ARGV[2])
      return token
    end
    if not s[3] and s[10] and waiting > 0 and call('HGET', KEYS[1], 'l:' .. s[10]) == owner then
      local token = math.max(last + 1, micros)
      call('HDEL', KEYS[1], 'w:' .. owner, 'l:' .. s[10])
      if waiting == 1 then
        call('HDEL', KEYS[1], 'w', 'i')
      else
        call('HSET', KEYS[1], 'w', waiting - 1, 'i', first + 1)
      end
      call('HSET', KEYS[1], 't', token, 'x', owner, 'xe', now + ARGV[4], 'xl', ARGV[2])
      return token
    end
    local join, direct_ms, channel = string.match(ARGV[5], '^x 1 0 (%d) %d+ (%d+) (%S+)$')
    if s[3] and s[3] ~= owner and ends > now and join == '1' and waiting < QUEUE
      and call('HEXISTS', KEYS[1], 'w:' .. owner) == 0
    then
      local mine = string.format('%.0f', number + 1)
      local entry = string.format('%s x 1 %.0f 0 0 %.0f %s %s %s', mine, now, micros,
        direct_ms, channel, ARGV[2])
      call('HSET', KEYS[1], 'q', mine, 'l:' .. mine, owner, 'w:' .. owner, entry,
        'w', waiting + 1, 'i', s[6] and first or mine)
      return {'busy', waiting, ends - now + 1, 1, 0, last}
    end
  end
end
