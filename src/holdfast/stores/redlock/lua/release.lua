-- Ends a hold. ARGV: owner, token, channel, shape: mode, slots.
-- Answers 1 if it was still held here, 2 if this node never heard of it, or forgot it, and admitted
-- nobody instead, and 0 if it is over here; and 4 for every client that listens for the name. These
-- are told also by a node that had no vote in it or gave its vote to another since: it may be the
-- one they listen to. Only a reader that leaves others behind lets nobody in.
local owner, to = ARGV[1], tonumber(ARGV[2])
local mode, slots = string.match(ARGV[4], '^(%a) (%S+)$')

local function is_over()
  if x or s[3] == owner then return true end
  for _, field in ipairs(over) do
    if field == 'h:' .. owner then return true end
  end
  if mode == 'x' then return c > to end
  if mode == 's' then return superseded > to or released(owner) end
  for slot in string.gmatch(slots, '%d+') do
    if slot_token(slot) > to then return true end
  end
  return false
end

-- A renewal of it that is still under way must not bring it back here.
local function pass_by()
  raise(to + 1)
  for slot in string.gmatch(slots, '%d+') do call('HSET', key, 't:' .. slot, to + 1) end
  keep(0)
end

-- Where readers were in its way to the last, it got its quorum without this node.
if s[10] == owner then call('HDEL', key, 'i', 'ie') end
local reader = holds[owner] and limit == '0'
local was = 0
if drop(owner, to) then
  was = 1
else
  if not is_over() then
    was = 2
    pass_by()
  end
  -- Its attempt may still be under way to this node, over another connection, and would be a vote
  -- that nobody takes back. No attempt of its owner's was sent later than its token says.
  remember(owner, ARGV[2])
end
if mode == 's' then
  local known = call('HGET', key, 'o') or ' '
  call('HSET', key, 'o', ' ' .. owner .. string.sub(known, 1, RELEASED_BYTES))
end
if reader and count > 0 then return was end
return was + 4 * wake(ARGV[3])
