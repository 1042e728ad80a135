-- Leaves no trace of an owner, and remembers it for a while: an attempt of its that was sent
-- before and arrives after this one finds nothing to take. ARGV: owner, sent µs, channel.
-- Answers 1 if it held.
local owner = ARGV[1]
local was = drop(owner, 0)
if s[10] == owner then call('HDEL', key, 'i', 'ie') end
local known = s[9] and tonumber(s[9]) > now and call('HGET', key, 'g') or ''
local remembered = ' ' .. owner .. '@' .. ARGV[2] .. string.sub(known, 1, REMEMBER_BYTES)
call('HSET', key, 'v', VERSION, 'g', remembered, 'd', now + REMEMBER)
keep(0)
if was or s[10] == owner then wake(ARGV[3]) end
return was and 1 or 0
