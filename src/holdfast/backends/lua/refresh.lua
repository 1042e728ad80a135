-- Keeps a place in line. ARGV: owner, how many wait behind it in its door.
-- Answers 1, or 0 if it no longer stands there.
expire()
local mode, weight, _, reserved, _, since, channel, label
if waiting > 0 then mode, weight, _, reserved, _, since, channel, label = read_wait(ARGV[1]) end
if mode and reserved ~= '0' and tonumber(reserved) < now then
  leave(ARGV[1])
  mode = nil
end
if mode then
  write_wait(ARGV[1], mode, weight, now, tonumber(reserved), ARGV[2], since, channel, label)
end
settle()
save()
return mode and 1 or 0
