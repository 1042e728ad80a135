-- Keeps a waiting writer's word that new readers shall wait. ARGV: owner. Answers 1.
-- Only what its attempt has said: this may arrive after the writer has left.
if s[10] == ARGV[1] and count > 0 and limit == '0' then
  call('HSET', key, 'ie', now + INTENT)
end
return 1
