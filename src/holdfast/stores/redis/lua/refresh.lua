-- Refreshes an entry of the queue. ARGV: owner, how many wait behind it in its client.
-- Returns 1, or 0 if the entry is gone.
expire()
local here = false
if waiting > 0 then
  local number, mode, weight, _, reserved, _, since, direct_ms, channel, label = read_wait(ARGV[1])
  here = number and (reserved == '0' or tonumber(reserved) >= now)
  if here then
    write_wait(ARGV[1], number, mode, weight, now, tonumber(reserved), ARGV[2], since, direct_ms,
      channel, label)
  end
end
admit_waiters()
return finish(here and 1 or 0)
