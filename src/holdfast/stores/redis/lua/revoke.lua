-- Ends all holds and answers their tokens.
expire()
local tokens = {}
if x then tokens[1] = drop(x) end
for _, owner in ipairs(holders()) do tokens[#tokens + 1] = drop(owner) end
settle()
return finish(tokens)
