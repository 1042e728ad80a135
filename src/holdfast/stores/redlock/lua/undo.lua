-- Undoes the vote for one attempt, and never that for a later attempt of the same owner.
-- ARGV: owner, sent µs of the attempt, channel (or - to publish nothing). Returns 1 if it held.
local hold = holds[ARGV[1]]
local at = s[3] == ARGV[1] and tonumber(s[13] or 0) or hold and hold.sent
local was = at and at <= tonumber(ARGV[2]) and drop(ARGV[1], 0)
-- The attempt may still be in flight to this node, on a connection that was given up since: it is
-- refused when it arrives.
if not was then
  remember(ARGV[1], ARGV[2])
  keep(0)
end
-- Also if it held nothing here: waiters may be subscribed on this node.
if ARGV[3] ~= '-' then wake(ARGV[3]) end
return was and 1 or 0
