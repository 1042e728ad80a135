-- Keeps a waiting writer's word that new readers shall wait. ARGV: owner. Answers 1.
if count > 0 and limit == '0' and (not intent or intent == ARGV[1]) then
  call('HSET', key, 'i', ARGV[1], 'ie', now + INTENT)
end
return 1
