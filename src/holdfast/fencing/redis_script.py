"""The Lua half of ``fencing.redis``: it says what ``fencing.rule`` says, in one step with the act.

KEYS[1] is the hash that remembers: ``name``, ``kind`` (lock or slots), ``writer``, ``highest``,
and ``s0``, ``s1`` … for slots. ARGV is the lock's name, the mode, the stamp, how many slots there
are, the slots; what follows belongs to the act. Stamps are text of 40 digits.
"""

from __future__ import annotations

__all__ = ["PRELUDE", "wrap"]

PRELUDE = """
local fence = KEYS[1]
local name, mode, stamp, count = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
local kept = redis.call('HMGET', fence, 'name', 'kind', 'writer', 'highest')
local kind = mode == 'slots' and 'slots' or 'lock'

local function refuse(slot, entered)
  return {0, kept[1], kept[2], kept[3] or '', kept[4] or '', slot or '', entered or ''}
end

local function enter()
  if kept[1] and (kept[1] ~= name or kept[2] ~= kind) then return refuse() end
  if not kept[1] then redis.call('HSET', fence, 'name', name, 'kind', kind) end
  if kind == 'lock' then
    local against = mode == 'shared' and kept[3] or mode ~= 'shared' and kept[4]
    if against and against > stamp then return refuse() end
    if mode ~= 'shared' then redis.call('HSET', fence, 'writer', stamp) end
    if not kept[4] or kept[4] < stamp then redis.call('HSET', fence, 'highest', stamp) end
    return nil
  end
  for i = 5, 4 + count do
    local entered = redis.call('HGET', fence, 's' .. ARGV[i])
    if entered and entered > stamp then return refuse(ARGV[i], entered) end
  end
  for i = 5, 4 + count do redis.call('HSET', fence, 's' .. ARGV[i], stamp) end
  return nil
end
"""

_ACT = """
local function act(KEYS, ARGV)
{}
end
local refused = enter()
if refused then return refused end
local keys, args = {{}}, {{}}
for i = 2, #KEYS do keys[i - 1] = KEYS[i] end
for i = 5 + count, #ARGV do args[i - 4 - count] = ARGV[i] end
return {{1, (act(keys, args))}}
"""


def wrap(script: str) -> str:
    """Embeds a script in ours; raises ``ValueError`` if that is not possible."""
    if script.lstrip().startswith("#!"):
        raise ValueError("a guarded script is the body alone, without a #! line")
    return _ACT.format(script)
