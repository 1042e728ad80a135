-- Stores a value if the owner still holds the lock. ARGV: owner, value, token, keep ms.
-- Returns 1, or 0 if the hold is gone.
expire()
if x ~= ARGV[1] and (n == 0 or not read_hold(ARGV[1])) then return finish(0) end
local keeps = tonumber(ARGV[4])
set('rv', ARGV[2], 'rt', ARGV[3], 'ra', now, 're', now + keeps)
keep(keeps)
return finish(1)
