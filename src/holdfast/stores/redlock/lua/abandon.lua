-- Removes all entries of an owner, and remembers the owner for a while: an attempt that was sent
-- before this request and arrives after it is refused.
-- ARGV: owner, sent µs, channel. Returns 1 if the owner held here, else 0.
local owner = ARGV[1]
local was = drop(owner, 0)
if s[10] == owner then call('HDEL', key, 'i', 'ie') end
remember(owner, ARGV[2])
keep(0)
if was or s[10] == owner then wake(ARGV[3]) end
return was and 1 or 0
