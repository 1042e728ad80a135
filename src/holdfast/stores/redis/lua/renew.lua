-- Extends a hold if its owner still has it. ARGV: owner, ttl ms, 1 to allow an end that is sooner than
-- the stored one: otherwise a later end stays, since this renewal may arrive late.
-- Returns 1, or 0 if the hold is gone.
local call = redis.call
local time = call('TIME')
local now = time[1] * 1000 + (time[2] - time[2] % 1000) / 1000
local s = call('HMGET', KEYS[1], 'v', 'x', 'xe', 'e', 'n', 'f')
if s[1] and s[1] ~= VERSION then return {'incompatible', string.sub(s[1], 1, 20)} end
local ttl, keeps_until = tonumber(ARGV[2]), s[4] and number(s[4], 'e')
local function later_of(stored)
  return ARGV[3] == '1' and now + ttl or math.max(stored, now + ttl)
end
local exclusive_until = s[2] == ARGV[1] and number(s[3] or '', 'xe') or 0
if exclusive_until > now then
  local renewed = later_of(exclusive_until)
  if INTEROP then
    if call('GET', KEYS[2]) ~= ARGV[1] then return 0 end
    call('PEXPIRE', KEYS[2], renewed - now)
  end
  call('HSET', KEYS[1], 'xe', renewed)
else
  local entry = s[5] and call('HGET', KEYS[1], 'h:' .. ARGV[1])
  if not entry then return 0 end
  local front, ends, rest = string.match(entry, '^([sn] %d+) (%d+) (.*)$')
  if not front then damaged('the entry of a hold') end
  local its_end, soonest = number(ends, 'an end'), number(s[6] or '', 'f')
  if its_end <= now then return 0 end
  local renewed = later_of(its_end)
  call('HSET', KEYS[1], 'h:' .. ARGV[1], front .. ' ' .. string.format('%.0f', renewed) .. ' ' .. rest,
    'f', math.min(soonest, renewed))
end
local until_ms = now + math.max(ttl, KEEP)
if not keeps_until or until_ms > keeps_until then
  call('HSET', KEYS[1], 'e', until_ms + DAY)
  call('PEXPIRE', KEYS[1], until_ms - now + DAY)
end
return 1
