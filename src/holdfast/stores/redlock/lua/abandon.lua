-- Leaves no trace of an owner, and remembers it for a while: an attempt of its that was sent
-- before and arrives after this one finds nothing to take. ARGV: owner, sent µs, channel.
-- Answers 1 if it held.
local owner = ARGV[1]
local was = drop(owner, 0)
if s[10] == owner then call('HDEL', key, 'i', 'ie') end
remember(owner, ARGV[2])
keep(0)
if was or s[10] == owner then wake(ARGV[3]) end
return was and 1 or 0
