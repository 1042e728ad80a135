-- Reads the holders. ARGV: the largest number of holders to return.
-- Returns {limit, now ms, {digest, mode, token, end ms, slots, label}…}.
local found, most = {}, tonumber(ARGV[1])
if x then
  found[1] = {digest(x), 'x', token, ends, '-', shown(call('HGET', key, 'xl') or '')}
end
for owner, hold in pairs(holds) do
  if #found < most then
    found[#found + 1] = {digest(owner), hold.mode, hold.token, hold.ends, hold.slots,
      shown(hold.label)}
  end
end
return {limit, now, found}
