-- Gives back what one attempt got here, and nothing that a later one of the same owner got.
-- ARGV: owner, sent µs of the attempt, channel, or - to wake nobody. Answers 1 if it held.
local hold = holds[ARGV[1]]
local at = s[3] == ARGV[1] and tonumber(s[13] or 0) or hold and hold.sent
local was = at and at <= tonumber(ARGV[2]) and drop(ARGV[1], 0)
-- Also where it held nothing: this may be the node that they listen to.
if ARGV[3] ~= '-' then wake(ARGV[3]) end
return was and 1 or 0
