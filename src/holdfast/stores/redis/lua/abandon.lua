-- Leaves no trace of an owner, and remembers it for a while: an attempt of its that was sent
-- before and arrives after this one finds nothing to take. ARGV: owner, sent µs.
-- Answers 1 if it held.
expire()
local was = drop(ARGV[1])
leave(ARGV[1])
local known = abandons_until and abandons_until > now and get('g') or ''
local remembered = ' ' .. ARGV[1] .. '@' .. ARGV[2] .. string.sub(known, 1, REMEMBER_BYTES)
set('v', VERSION, 'g', remembered, 'd', now + REMEMBER)
keep(0)
settle()
return finish(was and 1 or 0)
