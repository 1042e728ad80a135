-- The second round of a grant whose votes have different tokens: raises the counter to the token
-- that the holder chose. Refused if the owner does not hold here, or if this node granted a higher
-- token (the holder may not have received that vote). ARGV: owner, token. Returns 1 or 0.
local to = tonumber(ARGV[2])
if x == ARGV[1] and token <= to then
  raise(to)
  call('HSET', key, 'xt', to, 'q', to)
  return 1
end
local hold = holds[ARGV[1]]
if not hold or hold.token > to then return 0 end
raise(to)
hold.token = to
write(ARGV[1], hold)
return 1
