-- Gives a hold to another owner, with a new token and a whole ttl; its slots stay.
-- ARGV: owner and token of the hold, then the claim of the other owner as in `acquire`.
-- Returns as `attempt` does: the token, {'slots', token, slot…} or {'gone'}; or {'none'} if there is no
-- such hold, or {'barred', until} if this server may have lost holds.
local c = claim(3)
if abandoned(c) then return {'gone'} end
expire()
local taken = granted_before(c)
if not taken then
  local barred = LOSS and barred_until(c.max_ttl)
  if barred then return finish({'barred', barred}) end
  local mode, weight, its_end, its_token, its_slots
  if x == ARGV[1] then
    its_token, its_end = token, ends
  elseif n > 0 then
    mode, weight, its_end, its_token, its_slots = read_hold(ARGV[1])
  end
  if its_token and whole(its_token) == ARGV[2] then
    token = next_token(token, time[1] * 1000000 + time[2])
    its_end = math.max(its_end, now + c.ttl)
    set('t', token)
    keep(c.ttl)
    taken = token
    if not mode then
      x = c.owner
      set('x', c.owner, 'xe', its_end, 'xl', c.label)
    else
      unset('h:' .. ARGV[1])
      if mode == 'n' then taken = {'slots', token} end
      for slot in string.gmatch(its_slots, '%d+') do
        set('s:' .. slot, c.owner)
        if mode == 'n' then taken[#taken + 1] = tonumber(slot) end
      end
      write_hold(c.owner, mode, weight, its_end, token, its_slots, c.label)
    end
  end
end
admit_waiters()
return finish(taken or {'none'})
