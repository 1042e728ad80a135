-- Ends a hold. ARGV: owner, token, channel, shape: mode, slots, 1 if a request of this owner was not
-- answered: a copy of it may arrive after this release.
-- Returns 1 if this node had the hold; 2 if it does not know the hold and has granted no other
-- instead; 0 if the hold is over here. Adds 4 for every subscriber of the channel.
-- A node without a vote in the hold publishes the release too: waiters may be subscribed there.
-- A reader that leaves other readers behind is not published: no waiter could be granted.
local owner, to = ARGV[1], tonumber(ARGV[2])
local mode, slots, unanswered = string.match(ARGV[4], '^(%a) (%S+) (%d)$')

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

-- A renewal of the hold that is still in flight must not restore it here.
local function reject_renewals()
  raise(to + 1)
  for slot in string.gmatch(slots, '%d+') do call('HSET', key, 't:' .. slot, to + 1) end
  keep(0)
end

-- Removes the intent: a writer may have got its quorum without this node, where readers hold.
if s[10] == owner then call('HDEL', key, 'i', 'ie') end
local reader = holds[owner] and limit == '0'
local was = 0
if drop(owner, to) then
  was = 1
elseif not is_over() then
  was = 2
  reject_renewals()
end
if was ~= 1 or unanswered == '1' then
  -- The attempt may still be in flight to this node, on another connection: its vote would never be
  -- undone. No attempt of this owner was sent later than its token says.
  remember(owner, ARGV[2])
end
if mode == 's' then
  local known = call('HGET', key, 'o') or ' '
  call('HSET', key, 'o', ' ' .. owner .. string.sub(known, 1, RELEASED_BYTES))
end
if reader and count > 0 then return was end
return was + 4 * wake(ARGV[3])
