-- Ends all holds and returns their tokens.
expire()
local tokens = {}
if x then tokens[1] = drop(x) end
for _, owner in ipairs(holders()) do tokens[#tokens + 1] = drop(owner) end
admit_waiters()
return finish(tokens)
