-- Gives back what one attempt got here, and nothing that a later one of the same owner got.
-- ARGV: owner, sent µs of the attempt, channel, or - to wake nobody. Answers 1 if it held.
local hold = holds[ARGV[1]]
local at = s[3] == ARGV[1] and tonumber(s[13] or 0) or hold and hold.sent
if not at or at > tonumber(ARGV[2]) then return 0 end
if not drop(ARGV[1], 0) then return 0 end
if ARGV[3] ~= '-' then wake(ARGV[3]) end
return 1
