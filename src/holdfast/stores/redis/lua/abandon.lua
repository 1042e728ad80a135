-- Removes an owner from holders and queue, and remembers it for a while: an attempt of this owner
-- that was sent earlier and arrives later is refused. ARGV: owner, sent µs.
-- Returns 1 if the owner held the lock.
expire()
local was = drop(ARGV[1])
leave_queue(ARGV[1])
local known = abandons_until and abandons_until > now and get('g') or ''
local remembered = ' ' .. ARGV[1] .. '@' .. ARGV[2] .. string.sub(known, 1, REMEMBER_BYTES)
set('v', VERSION, 'g', remembered, 'd', now + REMEMBER)
keep(0)
admit_waiters()
return finish(was and 1 or 0)
