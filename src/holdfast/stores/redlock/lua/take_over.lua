-- Gives a hold to another owner, with a higher token. A node that does not know the hold has no vote
-- for it: it does not restore one, as a renewal does.
-- ARGV: owner, token, the other owner, its label, ttl ms, sent µs, proposed token.
-- Returns {1, slots} if the other owner has the hold now, with the proposed token; {2, c} if the
-- counter of this node is not below the proposal; {0} if the hold is not here.
local old, owner, ttl = ARGV[1], ARGV[3], tonumber(ARGV[5])
local sent, proposal = tonumber(ARGV[6]), tonumber(ARGV[7])
if abandoned(owner, sent) then return {0} end
if proposal > math.max(time[1] * 1000000 + time[2] + DAY * 1000, c + 1) then return {0} end
local from = (x == owner or holds[owner]) and owner or old
local hold = holds[from]
local has = x == from and token or hold and hold.token
if not has or (from == old and has ~= tonumber(ARGV[2])) then return {0} end
if proposal <= c then return {2, c} end
raise(proposal)
keep(ttl)
if x == from then
  take_alone(owner, math.max(ends, now + ttl), proposal, sent, ARGV[4])
  return {1, '-'}
end
if from ~= owner then
  call('HDEL', key, 'h:' .. old)
  holds[owner], holds[old] = hold, nil
  if hold.mode == 's' then  -- else a late renewal of the old owner would restore it
    local known = call('HGET', key, 'o') or ' '
    call('HSET', key, 'o', ' ' .. old .. string.sub(known, 1, RELEASED_BYTES))
  end
end
hold.ends, hold.token, hold.sent = math.max(hold.ends, now + ttl), proposal, sent
hold.label = ARGV[4]
write(owner, hold)
return {1, hold.slots}
