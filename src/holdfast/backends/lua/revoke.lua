-- Ends all holds and answers their tokens.
expire()
local tokens = {}
if x then tokens[1] = drop(x) end
if n > 0 then
  for _, owner in ipairs(call('ZRANGE', held, 0, -1)) do tokens[#tokens + 1] = drop(owner) end
end
settle()
save()
return tokens
