// The dashboard: reads the server's events and draws each state. What comes from the server is only ever set as text.
"use strict";

const KEY = "vattn-key";
const KEPT = 600; // samples: five minutes
const MOST_CELLS = 4096; // of a paged pool
const PREFIX_COLOURS = 4;
const DRAWN_FAR = 30; // seconds of an empty chart
const CALM_PERIOD = 5; // seconds between two drawings for those who prefer less motion
const calm = matchMedia("(prefers-reduced-motion: reduce)");
const wide = matchMedia("(min-width: 960px)"); // as in dashboard.css

const $ = (id) => document.getElementById(id);
const number = new Intl.NumberFormat("en");
const whole = (value) => number.format(Math.round(value));

const samples = [];
let state = null;
let paused = false;
let drawn = 0; // when the state that is drawn was seen
let connection = null;

// The connection.

function say(text, kind) {
  if ($("status").textContent !== text) $("status").textContent = text; // a live region: only changes are spoken
  $("status").className = kind;
  $("figures").classList.toggle("stale", kind === "off");
}

function ask(refusal) {
  say("A key is needed", "off");
  sessionStorage.removeItem(KEY);
  for (const id of ["figures", "pause", "forget"]) $(id).hidden = true;
  $("login").hidden = false;
  $("refused").textContent = refusal;
  $("key").focus();
}

async function watch() {
  connection?.abort();
  const mine = (connection = new AbortController());
  for (let delay = 1; !mine.signal.aborted; delay = Math.min(2 * delay, 15)) {
    const key = sessionStorage.getItem(KEY);
    let reason = "The server cannot be reached";
    try {
      const answer = await fetch("dashboard/events", {
        headers: key ? { Authorization: `Bearer ${key}` } : {},
        signal: mine.signal,
        cache: "no-store",
        credentials: "omit",
      });
      if (answer.status === 401) {
        ask(key ? "The server does not know this key." : "");
        return;
      }
      if (answer.ok) {
        if (!$("login").hidden) $("main").focus();
        $("login").hidden = true;
        $("figures").hidden = $("pause").hidden = false;
        $("forget").hidden = !key;
        reason = "The server ended the connection";
        await read(answer.body, (value) => {
          if (value.error) {
            reason = value.error.message;
          } else {
            delay = 1;
            take(value);
          }
        });
      } else {
        reason = (await answer.json()).error.message;
      }
    } catch (error) {
      if (mine.signal.aborted) return;
    }
    say(`${reason}; trying again`, "off");
    await new Promise((resolve) => setTimeout(resolve, delay * 1000));
  }
}

async function read(body, use) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      if (event.startsWith("data: {")) use(JSON.parse(event.slice(6)));
    }
  }
}

function take(next) {
  const last = state;
  if (last && next.time === last.time) {
    say("Live; a step takes long", "on");
    return;
  }
  state = next;
  say(next.sleeping ? "Live; the engine sleeps" : "Live", "on");
  const seconds = last ? next.time - last.time : 0;
  const rate = (name) => (seconds > 0 ? Math.max(0, next.driver[name] - last.driver[name]) / seconds : 0);
  samples.push({
    time: next.time,
    ...next.memory,
    ...next.rates,
    map_rate: rate("map_calls"),
    unmap_rate: rate("unmap_calls"),
    wait_rate: 1000 * rate("wait_seconds"),
  });
  if (samples.length > KEPT) samples.shift();
  if (paused || (calm.matches && next.time - drawn < CALM_PERIOD)) return;
  requestAnimationFrame(draw); // which a hidden tab does not run
}

// Figures as text.

const few = (value) => (value && value < 10 ? value.toFixed(1) : whole(value));

function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${value.toFixed(unit && value < 100 ? 1 : 0)} ${units[unit]}`;
}

function duration(seconds) {
  if (seconds < 0.0995) return `${(seconds * 1000).toFixed(seconds < 0.00995 ? 1 : 0)} ms`;
  if (seconds < 100) return `${seconds.toFixed(seconds < 10 ? 2 : 1)} s`;
  return `${Math.floor(seconds / 60)} min ${Math.floor(seconds % 60)} s`;
}

function write(id, text) {
  if ($(id).textContent !== text) $(id).textContent = text;
}

// Elements.

function svg(name, attributes, text) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== undefined) element.textContent = text;
  return element;
}

function html(name, text, className) {
  const element = document.createElement(name);
  if (text !== undefined) element.textContent = text;
  if (className) element.className = className;
  return element;
}

/** Rows of a table, which stay where they are, so that a reader's place in it is not lost. Cells: [text, class, title]. */
function fill(body, rows) {
  while (body.rows.length > rows.length) body.deleteRow(-1);
  rows.forEach((cells, at) => {
    const row = body.rows[at] ?? body.insertRow();
    cells.forEach(([text, className = "n", title], column) => {
      let cell = row.cells[column];
      if (!cell) {
        cell = row.appendChild(html(column ? "td" : "th", undefined, className));
        if (!column) cell.scope = "row";
      }
      if (cell.textContent !== text) cell.textContent = text;
      if (title !== undefined && cell.title !== title) cell.title = title;
    });
  });
}

/** Entries of a legend: a swatch, and text. */
function explain(list, entries) {
  if (list.children.length !== entries.length) {
    list.replaceChildren(
      ...entries.map(([swatch]) => {
        const item = html("li");
        item.append(swatch(), html("span"));
        return item;
      }),
    );
  }
  entries.forEach(([, text], at) => {
    const span = list.children[at].lastChild;
    if (span.textContent !== text) span.textContent = text;
  });
}

function lineSwatch(at) {
  return () => {
    const swatch = svg("svg", { width: 24, height: 8, "aria-hidden": "true" });
    swatch.style.width = "24px";
    swatch.append(svg("path", { d: "M0 4H24", class: `series s${at}` }));
    return swatch;
  };
}

const boxSwatch = (className) => () => html("i", undefined, className);

/** The size of an SVG in CSS pixels, which become its units. */
function size(element, height, width = element.clientWidth || 600) {
  element.setAttribute("viewBox", `0 0 ${width} ${height}`);
  element.style.height = `${height}px`;
  return width;
}

function patterns() {
  const stripes = svg("pattern", {
    id: "stripes",
    width: 5,
    height: 5,
    patternUnits: "userSpaceOnUse",
    patternTransform: "rotate(45)",
  });
  stripes.append(svg("path", { d: "M0 0V5", class: "on-stripes" }));
  const dots = svg("pattern", { id: "dots", width: 5, height: 5, patternUnits: "userSpaceOnUse" });
  dots.append(svg("circle", { cx: 2.5, cy: 2.5, r: 1, class: "on-dots" }));
  const defs = svg("defs", {});
  defs.append(stripes, dots);
  return defs;
}

// Charts.

function ceiling(value) {
  if (value <= 0) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 2.5, 5, 10].map((step) => step * power).find((each) => each >= value);
}

/** As `ceiling`, for bytes. */
function ceilingOfBytes(value) {
  const unit = 1024 ** Math.max(0, Math.floor(Math.log2(value || 1) / 10));
  return ceiling(value / unit) * unit;
}

/** Lines over time, newest on the right. Series: [key, label]. */
function chart(name, series, format, top = ceiling, height = 190) {
  const element = $(name);
  const width = size(element, height);
  const [left, right, above, below] = [64, width - 8, 8, height - 22];
  const end = samples.at(-1).time;
  const span = Math.max(DRAWN_FAR, end - samples[0].time);
  const highest = top(Math.max(0, ...samples.flatMap((sample) => series.map(([key]) => sample[key]))));
  const x = (time) => right - ((end - time) / span) * (right - left);
  const y = (value) => below - (value / highest) * (below - above);
  const parts = [];
  for (const share of [0, 0.5, 1]) {
    parts.push(svg("path", { d: `M${left} ${y(share * highest)}H${right}`, class: "grid" }));
    parts.push(svg("text", { x: left - 6, y: y(share * highest) + 4, class: "end" }, format(share * highest)));
  }
  parts.push(svg("text", { x: left, y: height - 5 }, `${Math.round(span)} s ago`));
  parts.push(svg("text", { x: right, y: height - 5, class: "end" }, "now"));
  const lines = series.map(([key], at) => {
    const points = samples.map((sample) => `${x(sample.time).toFixed(1)},${y(sample[key]).toFixed(1)}`);
    return svg("polyline", { points: points.join(" "), class: `series s${at}` });
  });
  element.replaceChildren(...parts, ...lines.reverse()); // the first one on top
  const now = series.map(([key, label]) => `${label} ${format(samples.at(-1)[key])}`);
  element.setAttribute("aria-label", `Chart over the last ${Math.round(span)} seconds. Now: ${now.join(", ")}.`);
  explain($(`${name}-legend`), series.map(([, label], at) => [lineSwatch(at), now[at]]));
}

// The parts of the page.

function draw() {
  if (!state) return;
  drawn = state.time;
  drawNow();
  drawMap();
  drawPages();
  drawMemory();
  drawSpeed();
  drawDriver();
  drawBlocks();
  drawKvPool();
  drawRequests();
}

function drawNow() {
  const lately = samples.slice(-4);
  const mean = (key) => lately.reduce((sum, sample) => sum + sample[key], 0) / lately.length;
  const ttft = state.ttft_seconds;
  document.title = `${state.counts.running} running · vattn`;
  write("server", `${state.model} · kv=${state.kv}`);
  write("running", whole(state.counts.running));
  write("waiting", whole(state.counts.waiting));
  write("generated", whole(mean("generation_tokens")));
  write("prompts", whole(mean("prompt_tokens")));
  write("ttft50", ttft ? duration(ttft.p50) : "–");
  write("ttft99", ttft ? duration(ttft.p99) : "–");
  write("ttft-count", ttft ? whole(ttft.count) : "0");
  write("usage", `${(100 * state.memory.usage).toFixed(state.memory.usage < 0.1 ? 1 : 0)} %`);
}

const letter = (prefix) => (prefix === null ? "" : prefix < 26 ? String.fromCharCode(65 + prefix) : String(prefix + 1));

function drawMap() {
  const block = state.block_tokens;
  const longest = Math.max(block, ...state.slots.map((slot) => slot.mapped));
  const tokens = $("whole").checked ? state.slot_tokens : Math.min(state.slot_tokens, Math.ceil(longest / block) * block);
  const columns = Math.max(8, 1 + Math.max(0, ...state.slots.map((slot) => slot.slot)));
  const height = !wide.matches ? 340 : state.kv === "virtual" ? 800 : 480; // as high as what stands beside it
  const [left, above] = [44, 20];
  const available = $("map").parentElement.clientWidth || 600;
  const width = size($("map"), height, Math.max(available, left + columns * 8));
  $("map").style.width = `${width}px`;
  const step = (width - left) / columns;
  const bar = step - Math.min(4, step / 4);
  const y = (token) => above + (Math.min(token, tokens) / tokens) * (height - above - 4);
  const parts = [patterns()];
  const band = (slot, from, to, ...classes) => {
    if (to <= from) return;
    const box = { x: left + slot.slot * step, y: y(from), width: bar, height: Math.max(1, y(to) - y(from)) };
    for (const name of classes) parts.push(svg("rect", { ...box, class: name }));
  };
  for (let column = 0; column < columns; column++) {
    const box = { x: left + column * step, y: above, width: bar, height: height - above - 4 };
    parts.push(svg("rect", { ...box, class: "free" }));
    if (step >= 20 || column % Math.ceil(20 / step) === 0) {
      parts.push(svg("text", { x: left + column * step + bar / 2, y: 13, class: "middle" }, column));
    }
  }
  const labels = [];
  for (const slot of state.slots) {
    if (!slot.active) {
      band(slot, 0, slot.mapped, "parked", "dots");
      continue;
    }
    const shared = Math.min(slot.shared, slot.length);
    band(slot, 0, shared, `p${(slot.prefix ?? 0) % PREFIX_COLOURS}`, "stripes");
    band(slot, shared, slot.length, "live");
    band(slot, slot.length, slot.mapped, "ahead");
    if (shared && slot.prefix !== null && bar >= 11) {
      const middle = left + slot.slot * step + bar / 2;
      labels.push(svg("rect", { x: middle - 6, y: above + 2, width: 12, height: 13, rx: 2, class: "plate" }));
      labels.push(svg("text", { x: middle, y: above + 12, class: "middle strong" }, letter(slot.prefix)));
    }
  }
  const high = (block / tokens) * (height - above - 4);
  if (high >= 3) {
    const lines = [];
    for (let token = block; token < tokens; token += block) lines.push(`M${left} ${y(token).toFixed(1)}H${width}`);
    parts.push(svg("path", { d: lines.join(""), class: "rows" }));
  }
  for (const share of [0, 0.25, 0.5, 0.75, 1]) {
    const token = Math.round((share * tokens) / block) * block;
    const at = Math.min(y(token) + 4, height - 2);
    parts.push(svg("text", { x: left - 6, y: at, class: "end" }, whole(Math.min(token, tokens))));
  }
  $("map").replaceChildren(...parts, ...labels);

  const active = state.slots.filter((slot) => slot.active);
  const sharing = active.filter((slot) => slot.shared);
  const prefixes = new Set(sharing.map((slot) => slot.prefix)).size;
  const parked = state.slots.length - active.length;
  $("map").setAttribute(
    "aria-label",
    `Page map: ${active.length} slots in use, ${sharing.length} of them share ${prefixes} ${prefixes === 1 ? "prefix" : "prefixes"}, ${parked} parked. The table below has the same.`,
  );
  const blocks = block > 1 ? `, in blocks of ${whole(block)}` : "";
  const order = state.pool ? " The block table below says where each block lies." : "";
  write(
    "map-lead",
    `Slots across, tokens down${blocks}; a slot can hold ${whole(state.slot_tokens)} tokens.${order}`,
  );
  $("parked-legend").hidden = state.kv !== "virtual";
  if ($("map-details").open) {
    fill(
      $("map-rows"),
      state.slots.map((slot) => [
        [whole(slot.slot), ""],
        [slot.active ? "in use" : "parked", ""],
        [letter(slot.prefix) || "–", ""],
        [whole(slot.shared)],
        [whole(slot.length)],
        [whole(slot.mapped)],
      ]),
    );
  }
}

function drawPages() {
  const pages = state.memory.pages;
  $("pages").hidden = !pages;
  if (!pages) return;
  const kinds = [
    ["owned", "live", ["live"], "of requests"],
    ["cached", "shared", ["p0", "stripes"], "cached prefixes"],
    ["parked", "parked", ["parked", "dots"], "parked"],
    ["other", "ahead", ["ahead"], "other"],
    ["free", "free", ["free"], "free"],
  ].filter(([name]) => name !== "other" || pages.other);
  const width = size($("pages-bar"), 16);
  let at = 0;
  const parts = [];
  for (const [name, , classes] of kinds) {
    const part = (pages[name] / pages.budget) * width;
    const box = { x: at, y: 1, width: part, height: 14 };
    if (part) for (const each of classes) parts.push(svg("rect", { ...box, class: each }));
    at += part;
  }
  $("pages-bar").replaceChildren(...parts);
  const texts = kinds.map(([name, , , label]) => `${whole(pages[name])} ${label}`);
  $("pages-bar").setAttribute("aria-label", `Of ${whole(pages.budget)} pages: ${texts.join(", ")}.`);
  const entries = kinds.map(([, swatch], index) => [boxSwatch(swatch), texts[index]]);
  explain($("pages-legend"), [[() => html("b"), `${whole(pages.budget)} pages:`], ...entries]);
}

function drawMemory() {
  const series = [
    ["used_bytes", `${state.kv} holds`],
    ["static_bytes", "static would hold"],
    ["paged_bytes", "paged would hold, unshared"],
  ];
  // A pool that is allocated whole says nothing over time.
  if (state.kv === "virtual" || state.kv === "dynamic") series.push(["physical_bytes", "physical, with caches"]);
  chart("memory", series, bytes, ceilingOfBytes);
  if (!$("memory-details").open) return;
  const columns = ["Time", ...series.map(([, label]) => label)];
  $("memory-columns").replaceChildren(
    ...columns.map((text, at) => {
      const cell = html("th", text, at ? "n" : "");
      cell.scope = "col";
      return cell;
    }),
  );
  const end = samples.at(-1).time;
  const shown = samples.filter((_, at) => (samples.length - 1 - at) % 10 === 0).reverse();
  fill(
    $("memory-rows"),
    shown.map((sample) => [
      [end === sample.time ? "now" : `${Math.round(end - sample.time)} s ago`, ""],
      ...series.map(([key]) => [bytes(sample[key])]),
    ]),
  );
}

function drawSpeed() {
  const series = [
    ["generation_tokens", "generated"],
    ["prompt_tokens", "prompts"],
  ];
  chart("speed", series, whole);
}

function drawDriver() {
  $("driver-section").hidden = state.kv !== "virtual";
  if (state.kv !== "virtual") return;
  const calls = [
    ["map_rate", "map calls per second"],
    ["unmap_rate", "unmap calls per second"],
  ];
  chart("driver", calls, few, ceiling, 130);
  chart("waiting-time", [["wait_rate", "milliseconds waited per second"]], few, ceiling, 100);
  write("map-calls", whole(state.driver.map_calls));
  write("unmap-calls", whole(state.driver.unmap_calls));
  write("waits", whole(state.driver.waits));
  write("wait-seconds", duration(state.driver.wait_seconds));
}

// The block table of one request, and the pool that it points into.

function chosen() {
  const withBlocks = new Map(state.slots.map((slot) => [slot.slot, slot]));
  const running = state.requests.filter((request) => withBlocks.has(request.slot));
  const select = $("request");
  const ids = ["", ...running.map((request) => request.id)];
  const known = [...select.options].map((option) => option.value);
  if (ids.join("\n") !== known.join("\n") && document.activeElement !== select) {
    const value = select.value;
    select.replaceChildren(...ids.map((id) => new Option(id || "the longest", id)));
    select.value = ids.includes(value) ? value : "";
  }
  const slots = running.map((request) => [request, withBlocks.get(request.slot)]);
  const longest = slots.reduce((best, each) => (!best || each[1].length > best[1].length ? each : best), null);
  return slots.find(([request]) => request.id === select.value) ?? longest;
}

function drawBlocks() {
  $("blocks-section").hidden = !state.pool;
  if (!state.pool) return;
  const found = chosen();
  const [blocks, length] = found ? [found[1].blocks, found[1].length] : [[], 0];
  const size = state.block_tokens;
  write("table-line", found ? `block_table[${found[0].id}] = [${blocks.join(", ")}${blocks.length * size < length ? ", …" : ""}]` : "no request runs");
  fill(
    $("block-rows"),
    blocks.map((physical, logical) => {
      const first = logical * size;
      const filled = Math.max(0, Math.min(size, length - first));
      const tokens = filled ? `${first}–${first + filled - 1}` : "–";
      return [[String(logical)], [String(physical)], [tokens], [`${filled}/${size}`]];
    }),
  );
  drawPool(new Set(blocks));
}

function drawPool(mine) {
  const count = Math.min(state.pool.blocks, MOST_CELLS);
  const users = new Map();
  for (const slot of state.slots) for (const each of slot.blocks) users.set(each, (users.get(each) ?? 0) + 1);
  const cached = new Set(state.pool.cached);
  const width = $("pool").clientWidth || 600;
  const cell = count <= 512 ? 26 : count <= 1536 ? 14 : 9;
  const across = Math.max(1, Math.floor(width / cell));
  size($("pool"), Math.ceil(count / across) * cell + 2, width);
  const kinds = { free: [], ahead: [], kept: [], live: [], p0: [] };
  const numbers = [];
  for (let at = 0; at < count; at++) {
    const [x, y] = [(at % across) * cell + 1, Math.floor(at / across) * cell + 1];
    const own = mine.has(at);
    const kind = own ? (users.get(at) > 1 ? "p0" : "live") : users.has(at) ? "ahead" : cached.has(at) ? "kept" : "free";
    kinds[kind].push(`M${x} ${y}h${cell - 3}v${cell - 3}h${3 - cell}z`);
    if (cell >= 26) {
      const where = { x: x + (cell - 3) / 2, y: y + 15, class: own ? "middle on" : "middle ink" };
      numbers.push(svg("text", where, at));
    }
  }
  const parts = Object.entries(kinds).map(([kind, cells]) => svg("path", { d: cells.join(""), class: kind === "p0" ? "p0 both" : kind }));
  $("pool").replaceChildren(...parts, ...numbers);
  const [held, total] = [users.size, state.pool.blocks];
  const more = total > count ? ` The first ${whole(count)} are drawn.` : "";
  $("pool").setAttribute(
    "aria-label",
    `Pool of ${whole(total)} blocks: ${whole(mine.size)} of this request, ${whole(held)} of all requests, ${whole(cached.size)} cached.${more}`,
  );
}

/** The memory that engines share: one bar, engine after engine, and a table. */
function drawKvPool() {
  const pool = state.kv_pool;
  $("kv-pool-section").hidden = !pool;
  if (!pool) return;
  const kinds = [
    ["owned", "live", ["live"], "of requests"],
    ["cached", "shared", ["p0", "stripes"], "cached prefixes"],
    ["parked", "parked", ["parked", "dots"], "parked"],
    ["unused", "ahead", ["ahead"], "lent, not used"],
    ["free", "free", ["free"], "free"],
  ];
  const sums = { owned: 0, cached: 0, parked: 0, unused: 0, free: Math.max(0, pool.free) };
  const width = size($("kv-pool"), 16);
  const parts = [];
  let at = 0;
  const box = (size, classes) => {
    const part = (size / pool.budget) * width;
    if (part) for (const each of classes) parts.push(svg("rect", { x: at, y: 1, width: part, height: 14, class: each }));
    at += part;
  };
  for (const engine of pool.borrowers) {
    const unused = Math.max(0, engine.lease - engine.owned - engine.cached - engine.parked);
    const sizes = { ...engine, unused };
    for (const [name, , classes] of kinds.slice(0, -1)) {
      box(sizes[name], classes);
      sums[name] += sizes[name];
    }
    parts.push(svg("path", { d: `M${at} 0V16`, class: "grid" }));
  }
  box(pool.kept, ["p0", "stripes"]);
  sums.cached += pool.kept;
  box(sums.free, ["free"]);
  $("kv-pool").replaceChildren(...parts);
  const known = pool.reachable && pool.free !== null;
  $("kv-pool").style.display = $("kv-pool-legend").style.display = known ? "" : "none";
  const texts = kinds.map(([name, , , label]) => `${bytes(sums[name])} ${label}`);
  write(
    "kv-pool-lead",
    known
      ? `${pool.name}: ${bytes(pool.budget)} for all engines; this one is ${pool.borrower}.`
      : `${pool.name}: its broker does not answer. This engine goes on with what it has.`,
  );
  $("kv-pool").setAttribute("aria-label", `Of ${bytes(pool.budget)}: ${texts.join(", ")}.`);
  explain(
    $("kv-pool-legend"),
    kinds.map(([, swatch], index) => [boxSwatch(swatch), texts[index]]),
  );
  fill(
    $("kv-pool-rows"),
    pool.borrowers.map((engine) => [
      [engine.name + (engine.lost ? " (lost)" : ""), "", engine.name],
      ...["at_least", "at_most", "lease", "owned", "parked", "cached", "shared", "asked", "asked_back"].map((key) => [bytes(engine[key])]),
    ]),
  );
}

function drawRequests() {
  const { running, waiting } = state.counts;
  const total = running + waiting;
  const shown = state.requests.length < total ? `; the first ${whole(state.requests.length)} are shown` : "";
  write("requests-lead", total ? `${whole(running)} running, ${whole(waiting)} waiting${shown}.` : "None at the moment.");
  fill(
    $("request-rows"),
    state.requests.map((request) => [
      [request.id, "", request.id],
      [request.state, ""],
      [request.slot === null ? "–" : whole(request.slot)],
      [whole(request.prompt_tokens)],
      [whole(request.cached_tokens)],
      [whole(request.computed_tokens)],
      [whole(request.output_tokens)],
      [duration(request.age_seconds)],
      [whole(request.preemptions)],
    ]),
  );
}

// What a person does.

$("login").addEventListener("submit", (event) => {
  event.preventDefault();
  const key = $("key").value.trim();
  if (!/^[\x21-\x7e]+$/.test(key)) {
    $("refused").textContent = "A key has letters, digits and signs of ASCII only.";
    return;
  }
  sessionStorage.setItem(KEY, key);
  $("key").value = "";
  $("refused").textContent = "";
  say("Connecting", "");
  watch();
});

$("forget").addEventListener("click", () => {
  connection.abort();
  ask("");
});

$("pause").addEventListener("click", () => {
  paused = !paused;
  $("pause").setAttribute("aria-pressed", String(paused));
  if (!paused) draw();
});

for (const id of ["whole", "request"]) $(id).addEventListener("change", draw);
for (const id of ["map-details", "memory-details"]) $(id).addEventListener("toggle", draw);
addEventListener("resize", () => requestAnimationFrame(draw));

watch();
