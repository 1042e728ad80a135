-- Renews the intent of a waiting writer, which keeps new readers out. ARGV: owner. Returns 1.
-- Only an attempt creates an intent: this request may arrive after the writer has stopped waiting.
if s[10] == ARGV[1] and count > 0 and limit == '0' then
  call('HSET', key, 'ie', now + INTENT)
end
return 1
