-- Keeps a place in line. ARGV: owner, how many wait behind it in its client.
-- Answers 1, or 0 if it no longer stands there.
expire()
local here = false
if waiting > 0 then
  local number, mode, weight, _, reserved, _, since, handed, channel, label = read_wait(ARGV[1])
  here = number and (reserved == '0' or tonumber(reserved) >= now)
  if here then
    write_wait(ARGV[1], number, mode, weight, now, tonumber(reserved), ARGV[2], since, handed,
      channel, label)
  end
end
settle()
return finish(here and 1 or 0)
