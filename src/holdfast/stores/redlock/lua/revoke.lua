-- Ends all holds. ARGV: channel. Returns {digest, token} of each.
local found, owners, last = {}, {}, c
if x then
  found[1], owners[1] = {digest(x), token}, x
end
for owner, hold in pairs(holds) do
  found[#found + 1], owners[#owners + 1] = {digest(owner), hold.token}, owner
end
for _, owner in ipairs(owners) do drop(owner, last) end
if #owners > 0 then call('HSET', key, 'q', c) end  -- as a writer would: no reader can be renewed
wake(ARGV[1])
return found
