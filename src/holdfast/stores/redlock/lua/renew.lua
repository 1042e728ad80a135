-- Extends a hold. Restores it if this node forgot it or never had it, unless this node has granted
-- another claim since. ARGV: owner, label, ttl ms, token, shape: mode, limit, slots.
-- Returns 1, or 0 if another owner holds or the hold is superseded.
-- A later expiry stays: this request may arrive after a newer one of the same holder.
-- The token replaces the time stamp of the attempt (it is never lower), so an undo of an earlier
-- attempt that arrives later does not end the hold.
local owner, label, ttl, to = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local mode, want, slots = string.match(ARGV[5], '^(%a) (%d+) (%S+)$')

local function free()
  if x or abandoned(owner, to) then return false end
  if mode == 'x' then return count == 0 and c <= to end
  if count > 0 and limit ~= want then return false end
  if mode == 's' then return superseded <= to and not released(owner) end
  for _, hold in pairs(holds) do
    for slot in string.gmatch(hold.slots, '%d+') do
      if string.find(',' .. slots .. ',', ',' .. slot .. ',', 1, true) then return false end
    end
  end
  for slot in string.gmatch(slots, '%d+') do
    if slot_token(slot) > to then return false end
  end
  return true
end

if x == owner then
  call('HSET', key, 'xe', math.max(ends, now + ttl))
  if token ~= to then call('HSET', key, 'xt', to, 'xs', to) end
elseif holds[owner] then
  local hold = holds[owner]
  hold.ends, hold.token, hold.sent = math.max(hold.ends, now + ttl), to, to
  write(owner, hold)
  if tonumber(s[15] or 0) <= now then write_count() end  -- all holds were read: the next need not be
elseif not free() then
  return 0
elseif mode == 'x' then
  c = math.max(c, to)
  take_alone(owner, now + ttl, to, to, label)
else
  call('HSET', key, 'v', VERSION, 'k', want)
  take(owner, {mode = mode, ends = now + ttl, token = to, sent = to, slots = slots,
    label = label})
end
raise(to)
keep(ttl)
return 1
