-- Reads holders and waiters, and changes nothing. Each list has at most ARGV[1] entries. At most four
-- times as many are read: some may be over, and stay stored until the next attempt.
-- Returns limit, now ms, holders as {mode, token, end ms, slots, label}…,
-- waiters as {mode, behind, since µs, label}….
local most = tonumber(ARGV[1])
local found, queue = {}, {}
if x and ends > now then
  found[1] = {'x', whole(token), whole(ends), '-', shown(call('HGET', state, 'xl') or '')}
end
for _, owner in ipairs(holders(4 * most)) do
  local mode, _, its_end, its_token, its_slots, label = read_hold(owner)
  if its_end > now and #found < most then
    found[#found + 1] = {mode, whole(its_token), whole(its_end), mode == 's' and '-' or its_slots,
      shown(label)}
  end
end
local seen = 0
walk_queue(function(owner)
  local number, mode, _, refreshed, reserved, behind, since, _, _, label = read_wait(owner)
  if not number then damaged('a place in line without an entry') end
  if refreshed + STALE >= now and (reserved == '0' or tonumber(reserved) >= now) then
    queue[#queue + 1] = {mode, behind, since, shown(label)}
  end
  seen = seen + 1
  return #queue >= most or seen >= 4 * most
end)
return {limit, now, found, queue}
