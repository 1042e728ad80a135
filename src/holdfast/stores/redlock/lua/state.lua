-- The state of a name on one node: one hash. Times are ms, attempts are their send time in µs.
-- The field names are the stored format and must not change.
--   v protocol version   c counter: this node granted no higher token   e when the key expires
--   q a reader with a lower token is superseded by a writer   k limit (0: a lock)
--   x xe xt xl   the exclusive holder: owner, expiry, token, label
--   xs xa        the attempt that was granted, and when
--   n f          the number of other holds, a lower bound of their ends
--   h:<owner>    one other hold: mode, expiry, token, attempt, since, slots, label
--   t:<slot>     the last token of a slot
--   i ie         intent: a waiting writer, and until when it keeps new readers out
--   g d          abandoned owners, and until when they are remembered
--   o            released readers, the newest ones
local call = redis.call
local key, time = KEYS[1], call('TIME')
local now = time[1] * 1000 + (time[2] - time[2] % 1000) / 1000
local s = call('HMGET', key, 'v', 'c', 'x', 'xe', 'xt', 'n', 'k', 'e', 'd', 'i', 'ie', 'q', 'xs', 'xa',
  'f')
if s[1] and s[1] ~= VERSION then return {'incompatible', string.sub(s[1], 1, 20)} end
for _, at in ipairs({2, 4, 5, 6, 7, 8, 9, 11, 12, 13, 14, 15}) do
  if s[at] then number(s[at], 'a number') end
end
local c, superseded = tonumber(s[2] or 0), tonumber(s[12] or 0)
local ends, token = tonumber(s[4] or 0), tonumber(s[5] or 0)
local x = s[3] and ends > now and s[3] or nil
local limit = s[7] or '0'
local intent = s[10] and tonumber(s[11] or 0) > now and s[10] or nil
local holds, count, over = {}, 0, {}
local soonest_end = tonumber(s[15] or 0)

local function read_hold(owner, entry)
  local mode, its_end, its_token, sent, since, slots, label =
    string.match(entry, '^([sn]) (%d+) (%d+) (%d+) (%d+) ([%d,-]+) (.*)$')
  if not mode then damaged('the entry of a hold') end
  for _, text in ipairs({its_end, its_token, sent, since}) do number(text, 'a number of a hold') end
  if tonumber(its_end) > now then
    holds[owner] = {mode = mode, ends = tonumber(its_end), token = tonumber(its_token),
      sent = tonumber(sent), since = tonumber(since), slots = slots, label = label}
  else
    over[#over + 1] = 'h:' .. owner
  end
end

local function read_all_holds()
  local all = call('HGETALL', key)
  for at = 1, #all, 2 do
    if string.sub(all[at], 1, 2) == 'h:' then read_hold(string.sub(all[at], 3), all[at + 1]) end
  end
  soonest_end = 0
  for _, hold in pairs(holds) do
    count = count + 1
    if soonest_end == 0 or hold.ends < soonest_end then soonest_end = hold.ends end
  end
end

-- Until the soonest end, no hold is over, and `n` is the number of holds: a script about one reader
-- (`OWNER`) reads the entry of that reader alone. Otherwise n readers would cost n^2.
if s[6] then
  if OWNER and limit == '0' and soonest_end > now then
    local entry = call('HGET', key, 'h:' .. OWNER)
    if entry then read_hold(OWNER, entry) end
    count = tonumber(s[6]) - #over
  else
    read_all_holds()
  end
end

-- Sets the expiry of the key: a week after its last use. After that the clock in every proposal
-- keeps tokens growing.
local function keep(ttl)
  local last = now + math.max(ttl, KEEP)
  if not s[8] or last > tonumber(s[8]) then
    call('HSET', key, 'v', VERSION, 'e', last + DAY)
    call('PEXPIRE', key, last + DAY - now)
  end
end

local function raise(to)
  if to > c then
    c = to
    call('HSET', key, 'c', c)
  end
end

-- Deletes expired holds; writes the number of other holds and the lower bound of their ends.
local function write_count()
  for from = 1, #over, 1000 do
    call('HDEL', key, unpack(over, from, math.min(from + 999, #over)))
  end
  if count > 0 then
    call('HSET', key, 'n', count, 'f', soonest_end)
  elseif s[6] then
    call('HDEL', key, 'n', 'f')
  end
end

local function write(owner, hold)
  call('HSET', key, 'h:' .. owner, string.format('%s %.0f %.0f %.0f %.0f %s %s', hold.mode,
    hold.ends, hold.token, hold.sent, hold.since or now, hold.slots, hold.label))
  for slot in string.gmatch(hold.slots, '%d+') do
    call('HSET', key, 't:' .. slot, hold.token)
  end
end

local function take(owner, hold)
  if not holds[owner] then count = count + 1 end
  holds[owner] = hold
  if soonest_end == 0 or hold.ends < soonest_end then soonest_end = hold.ends end
  write_count()  -- first: it may delete an expired entry of the same owner
  write(owner, hold)
end

local function take_alone(owner, its_end, its_token, sent, label)
  call('HSET', key, 'v', VERSION, 'c', c, 'q', its_token, 'k', '0', 'x', owner, 'xe', its_end,
    'xt', its_token, 'xs', sent, 'xa', now, 'xl', label)
  if s[10] == owner then call('HDEL', key, 'i', 'ie') end
end

-- Ends a hold for good: a renewal that is still in flight finds a higher counter and is refused.
-- Readers share the counter, so released readers are remembered one by one: the others can still
-- be renewed, and restored where a node forgot them. Returns whether the owner held here.
local function drop(owner, its_token)
  if s[3] == owner then
    raise(math.max(token, its_token) + 1)
    call('HDEL', key, 'x', 'xe', 'xt', 'xl', 'xs', 'xa')
    local was = x == owner
    x = nil
    return was
  end
  local hold = holds[owner]
  if not hold then return false end
  local last = math.max(hold.token, its_token) + 1
  raise(last)
  for slot in string.gmatch(hold.slots, '%d+') do call('HSET', key, 't:' .. slot, last) end
  call('HDEL', key, 'h:' .. owner)
  holds[owner] = nil
  count = count - 1
  write_count()
  return true
end

-- Publishes a release to the subscribers of the channel. Returns their number. Without the right to
-- publish no waiter is woken; waiters poll now and then anyway.
local function wake(channel)
  local listening = call('PUBSUB', 'NUMSUB', channel)[2]
  if listening > 0 then redis.pcall('PUBLISH', channel, listening) end
  return listening
end

local function abandoned(owner, sent)
  if not s[9] or tonumber(s[9]) <= now then return false end
  local known, mark = call('HGET', key, 'g') or '', ' ' .. owner .. '@'
  local at = string.find(known, mark, 1, true)
  return at and sent <= number(string.match(known, '^%d*', at + #mark), 'g')
end

-- Remembers an owner: an attempt that was sent until then and arrives later is refused. A late undo
-- of an earlier attempt changes nothing: only the newest entry of an owner is read.
local function remember(owner, sent)
  local known = s[9] and tonumber(s[9]) > now and call('HGET', key, 'g') or ''
  local mark = ' ' .. owner .. '@'
  local _, at = string.find(known, mark, 1, true)
  local before = at and string.match(known, '^%d+', at + 1)
  if before and tonumber(before) > tonumber(sent) then sent = before end
  local remembered = mark .. sent .. string.sub(known, 1, REMEMBER_BYTES)
  call('HSET', key, 'v', VERSION, 'g', remembered, 'd', now + REMEMBER)
end

-- Whether a reader was released here. Only the newest are known (RELEASED_BYTES).
local function released(owner)
  return string.find(call('HGET', key, 'o') or '', ' ' .. owner .. ' ', 1, true)
end

local function slot_token(slot)
  return number(call('HGET', key, 't:' .. slot) or '0', 'the token of a slot')
end

local function digest(owner) return string.sub(redis.sha1hex(owner), 1, 16) end
