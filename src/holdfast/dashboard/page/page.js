// The page: shows what /events sends. Every text goes in by textContent, never as markup.
"use strict";

const $ = (id) => document.getElementById(id);
const wants = { sort: "wait", filter: "", page: 1, open: "", tree: false };
let source = null;      // the stream of events
let latest = null;      // what it sent last
let latestAt = 0;       // when, by this machine's monotonic clock, in seconds
let breaking = null;    // the row that the dialog is about
let lostLink = false;
let refusal = "";       // why the server shows nothing any more

const clock = () => performance.now() / 1000;

function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds > 0 && seconds < 1) return seconds.toFixed(1) + " s";
  if (seconds < 60) return Math.floor(seconds) + " s";
  if (seconds < 3600) return Math.floor(seconds / 60) + " m " + String(Math.floor(seconds % 60)).padStart(2, "0") + " s";
  if (seconds < 86400) return Math.floor(seconds / 3600) + " h " + String(Math.floor(seconds % 3600 / 60)).padStart(2, "0") + " m";
  return Math.floor(seconds / 86400) + " d " + Math.floor(seconds % 86400 / 3600) + " h";
}

function element(tag, className, text) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

function put(target, text) {
  if (target.textContent !== text) target.textContent = text;
}

// A duration that grows (or shrinks) between two events: see tick().
function timed(target, seconds, direction, suffix) {
  target.dataset.seconds = seconds === null ? "" : String(seconds);
  target.dataset.direction = String(direction);
  target.dataset.suffix = suffix || "";
  tickOne(target, 0);
  return target;
}

function tickOne(target, elapsed) {
  if (target.dataset.seconds === "") { put(target, ""); return; }
  const seconds = Math.max(0, Number(target.dataset.seconds) + Number(target.dataset.direction) * elapsed);
  put(target, duration(seconds) + target.dataset.suffix);
}

function urgency(seconds) {
  return seconds === null ? "" : seconds >= 60 ? "bad" : seconds >= 10 ? "warm" : "";
}

// The children of a list, one for each item, made once for each key: focus survives an update.
function keyed(list, items, keyOf, make, update) {
  const active = document.activeElement;
  const known = new Map();
  for (const child of Array.from(list.children)) known.set(child.dataset.key, child);
  let place = list.firstChild;
  for (const item of items) {
    const key = keyOf(item);
    let child = known.get(key);
    if (child) known.delete(key);
    else { child = make(item); child.dataset.key = key; }
    update(child, item);
    if (child === place) place = place.nextSibling;
    else list.insertBefore(child, place);
  }
  for (const child of known.values()) child.remove();
  if (active && active.isConnected && document.activeElement !== active) active.focus({ preventScroll: true });
}

// Text that a person has marked, to copy it, is left alone.
function replace(target, children) {
  const marked = getSelection();
  if (marked.isCollapsed || !target.contains(marked.anchorNode)) target.replaceChildren(...children);
}

const who = (person) => person.host + " pid " + person.pid;

// ---- names

function makeRow() {
  const item = element("li");
  const row = element("div", "row");
  const labels = { name: "", wait: "waits", line: "line", by: "held by", held: "held", left: "left" };
  for (const [cell, label] of Object.entries(labels)) {
    const span = element("span", "cell-" + cell);
    span.dataset.label = label;
    row.append(span);
  }
  const button = element("button", "name");
  button.append(element("bdi"));
  button.type = "button";
  button.addEventListener("click", () => open(item.dataset.key));
  row.querySelector(".cell-name").append(button);
  const by = row.querySelector(".cell-by");
  by.append(element("bdi", "by"), element("bdi", "note"));
  item.append(row);
  return item;
}

function updateRow(item, data) {
  const cell = (name) => item.querySelector(".cell-" + name);
  const button = item.querySelector("button.name");
  put(button.firstChild, data.shown);
  button.setAttribute("aria-expanded", String(data.open));
  item.classList.toggle("open", data.open);
  timed(cell("wait"), data.wait, 1);
  cell("wait").className = "cell-wait " + urgency(data.wait);
  put(cell("line"), data.waiting ? String(data.waiting) : "");
  const [first] = data.holders;
  const others = data.holders.length + data.more_holders - 1;
  put(item.querySelector(".by"), first ? who(first) + (others > 0 ? " and " + others + " more" : "") : "nobody");
  put(item.querySelector(".note"), first ? first.note : "");
  timed(cell("held"), data.held, 1);
  timed(cell("left"), data.left, -1);
  updateDetail(item, data);
}

function updateDetail(item, data) {
  let detail = item.querySelector(".detail");
  if (!data.open) { if (detail) detail.remove(); return; }
  if (!detail) {
    detail = element("div", "detail");
    detail.append(element("div"), element("button", "danger", "Break …"), element("div"));
    detail.children[1].type = "button";
    detail.children[1].addEventListener("click", () => askBreak());
    item.append(detail);
  }
  const [holders, button, waiters] = detail.children;
  const notice = data.notice ? [element("p", "notice", data.notice)] : [];
  replace(holders, [...notice, element("h3", "", data.holders.length ? "Held by" : "Held by nobody"), people(data.holders, "holder", data.more_holders)]);
  button.hidden = !(latest.can_break && data.holders.length);
  replace(waiters, data.waiters.length ? [element("h3", "", "Waiting, in this order"), people(data.waiters, "waiter", data.more_waiters)] : []);
}

function people(list, kind, more) {
  const made = element("ul", "people");
  for (const person of list) made.append(onePerson(person, kind));
  if (more) made.append(element("li", kind, "and " + more + " more"));
  return made;
}

function onePerson(person, kind) {
  const item = element("li", kind);
  item.append(element("bdi", "", who(person) + " (" + person.thread + ")"));
  const facts = element("span", "facts");
  facts.append(person.mode + (person.slots && person.slots.length ? " slots " + person.slots.join(", ") : ""));
  facts.append(kind === "holder" ? " · held for " : " · waits for ", timed(element("span"), person.since, 1));
  if (kind === "holder") facts.append(" · left ", timed(element("span"), person.left, -1), " · token " + person.token);
  else if (person.behind) facts.append(" · and " + person.behind + " more of its process");
  item.append(facts);
  if (person.note) item.append(element("bdi", "note", person.note));
  return item;
}

// ---- tree, leaders, changes, check

function treeLine(branch) {
  const depth = branch.depth > 7 ? "deep" : "d" + branch.depth;
  const item = element("li", depth + " " + branch.what);
  if (branch.what === "name") {
    item.append(element("bdi", "name", branch.shown));
    if (branch.circular) item.append(element("span", "circular", " ← a circle of waiters: a deadlock"));
    return item;
  }
  item.append(element("span", "what", branch.what === "holder" ? "held by" : "waits"));
  item.append(element("bdi", "", who(branch.who) + " (" + branch.who.thread + ")"), " ");
  item.append(timed(element("span", branch.what === "waiter" ? urgency(branch.who.since) : ""), branch.who.since, 1));
  if (branch.who.note) item.append(element("bdi", "note", branch.who.note));
  return item;
}

function leader(entry) {
  const item = element("li", entry.leader ? "" : "none");
  item.append(element("b", "shown", entry.shown));
  const line = element("span");
  if (entry.leader) line.append(element("bdi", "", who(entry.leader)), " for ", timed(element("span"), entry.leader.since, 1));
  else line.append(element("strong", "bad", "no leader"));
  line.append(entry.standby ? ", " + entry.standby + " standing by" : ", nobody standing by");
  item.append(line);
  return item;
}

function change(entry) {
  const item = element("li", entry.what);
  item.append(timed(element("time"), entry.ago, 1, " ago"), element("span", "what", entry.what));
  if (entry.shown) item.append(element("bdi", "shown", entry.shown));
  if (entry.detail) item.append(element("bdi", "note", entry.detail));
  return item;
}

function finding(entry) {
  const item = element("li");
  item.append(element("span", "level " + entry.level, entry.level), element("bdi", "", entry.detail));
  item.append(" ", element("span", "subject", entry.subject));
  return item;
}

// ---- showing

function show(data) {
  latest = data;
  latestAt = clock();
  lostLink = false;
  refusal = "";
  put($("store"), data.store);
  $("logout").hidden = !data.can_log_out;
  const totals = data.totals;
  put($("total-waiting"), String(totals.waiting));
  document.title = (totals.waiting ? totals.waiting + " waiting · " : "") + "Holdfast";
  timed($("total-wait"), totals.longest_wait || null, 1);
  $("total-wait").className = urgency(totals.longest_wait);
  put($("total-held"), String(totals.held));
  put($("total-names"), String(totals.names) + (data.most_names ? "+" : ""));
  put($("total-lost"), String(data.counts.lost));
  $("total-lost").className = data.counts.lost ? "bad" : "";
  put($("total-broken"), String(data.counts.broken));
  put($("ended"), String(data.counts.ended));
  timed($("since"), data.watched, 1);
  $("since").dataset.suffix = " watched";
  $("leaders-section").hidden = !data.leaders.length;
  replace($("leaders"), data.leaders.map(leader));
  showNames(data);
  const quiet = element("li", "", "nothing so far");
  replace($("changes"), data.changes.length ? data.changes.map(change) : [quiet]);
  showCheck(data.check);
  tick();
}

function showNames(data) {
  const known = new Map(data.rows.map((row) => [row.name, row]));
  if (wants.open && !wants.tree && !known.has(wants.open)) wants.open = "";
  keyed($("names"), data.rows, (row) => row.name, makeRow, updateRow);
  replace($("tree"), data.tree.map(treeLine));
  $("names").hidden = wants.tree || !data.rows.length;
  document.querySelector(".head").hidden = wants.tree || !data.rows.length;
  $("tree").hidden = !wants.tree || !data.tree.length;
  const shown = wants.tree ? data.tree.length : data.rows.length;
  $("empty").hidden = Boolean(shown);
  const none = wants.tree ? "nobody waits for anything" : "nothing is held or waited for";
  put($("empty"), wants.filter ? "nothing matches the filter" : data.age === null ? "reading the store …" : none);
  document.querySelector(".sort").hidden = wants.tree;  // a tree has an order of its own
  $("pager").hidden = wants.tree || data.pages < 2;
  wants.page = data.page;
  put($("pages"), "page " + data.page + " of " + data.pages + " · " + totalsText(data));
  $("previous").disabled = data.page <= 1;
  $("next").disabled = data.page >= data.pages;
}

function totalsText(data) {
  const matching = data.totals.matching.toLocaleString("en") + (data.most_names ? "+" : "") + " names";
  return wants.filter ? matching + " match" : matching;
}

function showCheck(check) {
  const found = check.error ? [finding({ level: "broken", detail: check.error, subject: "" })] : check.findings.map(finding);
  replace($("check"), found.length ? found : [element("li", "", "not checked yet")]);
}

// Every second: the ages grow, also when nothing arrives any more.
function tick() {
  if (!latest) return;
  const elapsed = clock() - latestAt;
  for (const target of document.querySelectorAll("[data-seconds]")) tickOne(target, elapsed);
  const age = latest.age === null ? null : latest.age + elapsed;
  const stale = age !== null && age > latest.stale_after;
  put($("age"), age === null ? "reading …" : (stale ? "stale: " : "live: ") + duration(Math.round(age)) + " old");
  $("age").classList.toggle("stale", stale || Boolean(latest.error));
  $("main").classList.toggle("stale", stale);
  banner(stale, age);
}

function banner(stale, seconds) {
  const age = seconds === null ? null : Math.round(seconds);
  const text = refusal ? "The dashboard answers: " + refusal + (age === null ? "" : ". What is shown is " + duration(age) + " old.")
    : latest.error ? "The store can't be read: " + latest.error + (age === null ? "" : ". What is shown is " + duration(age) + " old.")
    : stale && lostLink ? "The dashboard's server does not answer. What is shown is " + duration(age) + " old."
    : stale ? "The store does not answer. What is shown is " + duration(age) + " old." : "";
  $("banner").hidden = !text;
  put($("banner"), text);
}

// ---- the stream

function query() {
  return new URLSearchParams({ sort: wants.sort, filter: wants.filter, page: wants.page, open: wants.open, tree: wants.tree ? "1" : "" });
}

function connect() {
  if (source) source.close();
  source = new EventSource("events?" + query());
  source.onmessage = (event) => show(JSON.parse(event.data));
  source.onerror = () => {
    lostLink = true;
    if (source.readyState === EventSource.CLOSED) refused();
  };
}

// A stream that is refused does not say why: ask for what it would show. One viewer too many for a
// stream gets that, every three seconds.
async function refused() {
  const refusedSource = source;
  const isOld = () => source !== refusedSource;  // a person has asked for something else meanwhile
  try {
    const answer = await fetch("data?" + query(), { cache: "no-store" });
    if (isOld()) return;
    if (answer.status === 401) { askToken(); return; }
    if (answer.ok) show(await answer.json());
    else tellRefusal(await problem(answer));
  } catch { /* it does not answer: tick() tells that */ }
  setTimeout(() => { if (!isOld()) connect(); }, 3000);
}

function tellRefusal(text) {
  refusal = text;
  if (latest) tick();
  else put($("age"), text);
}

async function problem(answer) {
  try { return (await answer.json()).error || answer.statusText; } catch { return "error " + answer.status; }
}

function post(path, body) {
  return fetch(path, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) });
}

function askToken() {
  if ($("login").open) return;
  $("login").showModal();
  $("token").focus();
}

async function login(event) {
  event.preventDefault();
  const answer = await post("login", { token: $("token").value });
  $("token").value = "";
  $("login-error").hidden = answer.ok;
  if (!answer.ok) { put($("login-error"), await problem(answer)); return; }
  $("login").close();
  connect();
}

async function logout() {
  await post("logout", {});
  location.reload();
}

// ---- breaking

function askBreak() {
  const row = latest && latest.rows.find((each) => each.open);
  if (!row || !row.holders.length || !latest.can_break) return;
  breaking = row;
  put($("break-name"), row.shown);
  $("break-holders").replaceChildren(...people(row.holders, "holder", row.more_holders).children);
  $("break-error").hidden = true;
  $("reason").value = "";
  $("break").showModal();
  $("reason").focus();
}

async function doBreak(event) {
  event.preventDefault();
  $("break-go").disabled = true;
  let message = "";
  try {
    const answer = await post("break", { name: breaking.name, tokens: breaking.tokens, reason: $("reason").value });
    if (!answer.ok) message = await problem(answer);
  } catch { message = "the dashboard's server does not answer: it is not known whether the hold was ended"; }
  $("break-go").disabled = false;
  $("break-error").hidden = !message;
  put($("break-error"), message);
  if (!message) $("break").close();
}

// ---- what a person does

function ask(changes) {
  Object.assign(wants, changes);
  $("as-list").setAttribute("aria-pressed", String(!wants.tree));
  $("as-tree").setAttribute("aria-pressed", String(wants.tree));
  connect();
}

function open(name) {
  ask({ open: wants.open === name ? "" : name });
}

// Says whether there is anything to move in: else the arrow keys scroll the page.
function move(step) {
  const buttons = Array.from(document.querySelectorAll("#names button.name"));
  const at = buttons.indexOf(document.activeElement);
  const next = buttons[at < 0 ? 0 : Math.min(buttons.length - 1, Math.max(0, at + step))];
  if (next) next.focus();
  return Boolean(next);
}

function turn(step) {
  if (!latest) return;
  const page = Math.min(latest.pages, Math.max(1, wants.page + step));
  if (page !== wants.page) ask({ page });
}

const keys = {
  "/": () => $("filter").focus(),
  j: () => move(1), ArrowDown: () => move(1),
  k: () => move(-1), ArrowUp: () => move(-1),
  n: () => turn(1), p: () => turn(-1),
  t: () => ask({ tree: !wants.tree }),
  b: () => askBreak(),
  Escape: () => { if (wants.open) ask({ open: "" }); },
};

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
  const typing = event.target.closest("input, select");
  if (typing) {
    if (event.key === "Escape") leave(event);
    return;
  }
  const action = keys[event.key];
  if (action && action() !== false) event.preventDefault();
});

// Escape empties the filter first, as it does in other search fields, then leaves it.
function leave(event) {
  event.preventDefault();
  if (event.target !== $("filter") || !$("filter").value) { event.target.blur(); return; }
  $("filter").value = "";
  ask({ filter: "", page: 1 });
}

let typed = 0;
$("filter").addEventListener("input", () => {
  clearTimeout(typed);
  typed = setTimeout(() => ask({ filter: $("filter").value, page: 1 }), 200);
});
$("sort").addEventListener("change", () => ask({ sort: $("sort").value, page: 1 }));
$("as-list").addEventListener("click", () => ask({ tree: false }));
$("as-tree").addEventListener("click", () => ask({ tree: true }));
$("previous").addEventListener("click", () => turn(-1));
$("next").addEventListener("click", () => turn(1));
$("break-form").addEventListener("submit", doBreak);
$("break-cancel").addEventListener("click", () => $("break").close());
$("login-form").addEventListener("submit", login);
$("login").addEventListener("cancel", (event) => event.preventDefault());
// A browser closes it all the same at a second Escape: ask again, there is nothing to see without.
$("login").addEventListener("close", () => { if (!source || source.readyState === EventSource.CLOSED) refused(); });
$("logout").addEventListener("click", logout);
// A hidden tab needs no stream: browsers allow six connections to a server.
document.addEventListener("visibilitychange", () => {
  if (document.hidden && source) { source.close(); source = null; } else if (!source) connect();
});
setInterval(tick, 1000);
connect();
