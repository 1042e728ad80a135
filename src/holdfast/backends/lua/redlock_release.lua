-- Ends a hold. ARGV: owner, token, channel.
-- Answers 1 if it was still held here, and 2 for every door that listens for the name.
local was = drop(ARGV[1], tonumber(ARGV[2]))
if not was then return 0 end
local shared = count > 0 and limit == '0'
if shared then return 1 end
return 1 + 2 * wake(ARGV[3])
