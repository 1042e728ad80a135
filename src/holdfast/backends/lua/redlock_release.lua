-- Ends a hold. ARGV: owner, token, channel.
-- Answers 1 if it was still held here, and 2 for every door that listens for the name. These are
-- told also by a node that had no vote in it or gave its vote to another since: it may be the one
-- they listen to. Only a reader that leaves others behind lets nobody in.
local reader = holds[ARGV[1]] and limit == '0'
local was = drop(ARGV[1], tonumber(ARGV[2])) and 1 or 0
if reader and count > 0 then return was end
return was + 2 * wake(ARGV[3])
