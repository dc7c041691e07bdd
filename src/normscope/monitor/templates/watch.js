"use strict";
(() => {
  const POLL = 1000, POLL_OVER = 5000, POLL_HIDDEN = 10000, MOST_CARDS = 24, MOST_EVENTS = 100;
  const at = (id) => document.getElementById(id);
  const make = (tag, words, css) => {
    const node = document.createElement(tag);
    if (words !== undefined) node.textContent = words;
    if (css) node.className = css;
    return node;
  };
  const drawn = (tag, attributes, words) => {
    const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    if (words !== undefined) node.textContent = words;
    return node;
  };
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const clamp = (value, low, high) => Math.min(high, Math.max(low, value));
  const data = location.pathname.replace(/\/?$/, "/data");
  const base = document.title;

  // Figures in words.

  const superscript = (n) => String(n).replace(/./g, (c) => "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"["-0123456789".indexOf(c)]);
  const figure = (value, digits = 4) => {
    if (value === null || value === undefined) return "not measured";
    if (typeof value === "string") return { nan: "NaN", inf: "∞", "-inf": "−∞" }[value];
    const size = Math.abs(value);
    if (value === 0 || (size >= 1e-3 && size < 1e5)) return String(Number(value.toPrecision(digits))).replace("-", "−");
    const [mantissa, exponent] = value.toExponential(digits - 1).split("e");
    return String(Number(mantissa)).replace("-", "−") + "×10" + superscript(Number(exponent));
  };
  const times = (log) => "× " + figure(2 ** log, 3);
  const beside = (value) => (now.against.is_linear ? (value > 0 ? "+" : "") + figure(value, 3) : times(value));
  const many = (count, word) => `${count} ${word}${count === 1 ? "" : "s"}`;
  const duration = (s) => (s < 90 ? `${Math.round(s)} s` : s < 5400 ? `${Math.round(s / 60)} min` : `${(s / 3600).toFixed(1)} h`);
  const range = (input) => {
    const shape = Array.isArray(input.shape) ? ` [${input.shape.join(", ")}]` : "";
    const values = [input.low, input.high].every((value) => value !== null && value !== undefined) ? `, ${figure(input.low)} to ${figure(input.high)}` : "";
    const bad = [["num_nan", "NaN"], ["num_infinite", "infinite"]].filter(([name]) => input[name]).map(([name, word]) => `, ${input[name]} ${word}`);
    return `${input.name ? input.name + ": " : ""}${input.dtype ?? ""}${shape}${values}${bad.join("")}`;
  };
  const where = (record) => {
    const ranks = record.ranks || [record.rank];
    return `step ${record.step}` + (now.ranks.length > 1 ? `, rank${ranks.length > 1 ? "s" : ""} ${ranks.slice(0, 8).join(", ")}${ranks.length > 8 ? ", …" : ""}` : "");
  };
  const earlier = (record) =>
    now.ranks.some((each) => each.rank === record.rank && record.attempt < each.attempt) ? " (before the run was resumed)" : "";

  // What the server has said, and what it is asked for next.

  let now = null, raised = [], alarms = [], events = [], chosen = null, reading = null, gone = 0, timer = 0, heard = 0, asking = 0;
  const held = (answer) => ({ loss: answer.loss, heat: answer.heat, good: answer.against?.loss, ratio: answer.against?.heat });
  const asked = () => {
    const words = { quantity: at("quantity").value, rank: at("rank").value };
    if (now) {
      Object.assign(words, { version: now.version, alarms: raised.length, events: events.length });
      for (const [name, columns] of Object.entries(held(now))) if (columns) words[name] = `${columns.width}.${columns.rows}`;
    }
    return new URLSearchParams(words);
  };
  const joined = (old, fresh) => {
    if (!fresh || !fresh.start || !old) return fresh;
    const both = (a, b) => a.slice(0, fresh.start).concat(b);
    const found = { ...fresh, first: both(old.first, fresh.first), last: both(old.last, fresh.last) };
    for (const name of ["low", "high"]) if (fresh[name]) found[name] = fresh[name].map((row, i) => both(old[name][i], row));
    found.broken = old.broken.filter(([column]) => column < fresh.start).concat(fresh.broken);
    return found;
  };
  const folded = (records) => {
    // An alarm that several ranks raised at the same step is shown once.
    const found = new Map();
    for (const each of records) {
      const key = `${each.attempt} ${each.step} ${each.code}`;
      if (!found.has(key)) found.set(key, { ...each, ranks: [] });
      if (!found.get(key).ranks.includes(each.rank)) found.get(key).ranks.push(each.rank);
    }
    return [...found.values()];
  };
  const poll = async () => {
    clearTimeout(timer);
    const mine = ++asking;
    try {
      const answer = await fetch(data + "?" + asked(), { cache: "no-store" });
      if (mine !== asking) return;
      gone = 0;
      if (answer.ok) take(await answer.json());
      else trouble(answer.status === 403
        ? "The server refuses this page: another normscope watch has its port now. Open the address that it printed."
        : `The run cannot be read. ${(await answer.json()).error}`);
    } catch (error) {
      if (mine !== asking) return;
      if (!(error instanceof TypeError)) throw error;
      gone += 1;
      if (gone > 1) trouble("The server is gone: normscope watch has ended. " + (now ? "The page shows the last it said." : ""));
    } finally {
      if (mine === asking) {
        const over = now && (now.state === "ended" || now.state === "failed");
        timer = setTimeout(poll, document.hidden ? POLL_HIDDEN : over || gone > 3 ? POLL_OVER : POLL);
      }
    }
  };
  const trouble = (words) => {
    at("trouble").textContent = words;
    at("trouble").hidden = !words;
    document.body.classList.toggle("stale", Boolean(words));
  };
  const take = (answer) => {
    const same = now && now.version === answer.version;
    const before = now ? held(now) : {}, fresh = held(answer);
    const grown = Object.keys(fresh).some((name) => fresh[name]?.rows !== before[name]?.rows);
    const changed = !same || grown || answer.alarms.length || answer.events.length;
    answer.loss = joined(same && before.loss, fresh.loss);
    answer.heat = joined(same && before.heat, fresh.heat);
    if (answer.against) {
      answer.against.loss = joined(same && before.good, fresh.good);
      answer.against.heat = joined(same && before.ratio, fresh.ratio);
    }
    raised = raised.slice(0, answer.first_alarm).concat(answer.alarms);
    alarms = folded(raised);
    events = events.slice(0, answer.first_event).concat(answer.events);
    if (!same) reading = null;
    now = answer;
    heard = Date.now();
    trouble("");
    at("main").hidden = false;
    head();
    if (changed) { lists(); draw(); }
  };

  // State, first wrong value, figures.

  const head = () => {
    const words = {
      running: "Running", silent: `Silent for ${duration(now.silence)}`, gone: "Gone", failed: "Failed", ended: "Ended",
    }[now.state];
    at("head").className = "top " + { running: "good", silent: "doubt", gone: "bad", failed: "bad", ended: "over" }[now.state];
    at("state").textContent = words;
    at("lead").textContent = now.reason ? now.reason[0].toUpperCase() + now.reason.slice(1) + (/[.!?]$/.test(now.reason) ? "" : ".") : "";
    at("lead").hidden = !now.reason;
    at("model").textContent = typeof now.model === "string" ? now.model : "";
    const planned = Number.isInteger(now.planned) && now.planned > 0 ? now.planned : null;
    at("progress").hidden = !planned || now.last_step === null;
    if (planned) at("progress").value = (now.last_step || 0) / planned;
    document.title = (now.last_step === null ? "" : `step ${now.last_step} · `) + `${words} · ${base}`;
    at("clock").textContent = `Read at ${new Date(heard).toLocaleTimeString("en-GB")}.`;
    const wrong = now.first_wrong_value;
    at("wrong").hidden = !wrong;
    if (wrong) {
      at("wrong-where").textContent = where(wrong) + earlier(wrong);
      at("wrong-words").textContent = wrong.data.sentence || "";
      const facts = ["module", "op", "source", "phase", "seen"].filter((name) => typeof wrong.data[name] === "string" && wrong.data[name]);
      const named = { op: "operation", seen: "first seen as" };
      const lines = facts.flatMap((name) => [make("dt", named[name] || name), make("dd", wrong.data[name])]);
      for (const input of (Array.isArray(wrong.data.inputs) ? wrong.data.inputs : []).slice(0, 6)) lines.push(make("dt", "input"), make("dd", range(input)));
      at("wrong-facts").replaceChildren(...lines);
    }
    at("parting").hidden = !now.against;
    if (now.against) {
      at("parting-name").textContent = now.against.name;
      at("parting-words").textContent = now.against.parting.sentence;
      const { where, others } = now.against.parting, shown = where.slice(0, 8).map((each) => each.site || each.quantity);
      at("parting-more").textContent = where.length > 1 ? `First at the same step: ${shown.join(", ")}` + (where.length > 8 ? ` and ${where.length - 8} more.` : ".") : "";
    }
    const rows = [];
    const row = (name, words, more) => {
      const value = make("dd", words);
      if (more) value.append(make("small", more));
      const both = make("div");
      both.append(make("dt", name), value);
      rows.push(both);
    };
    row("Step", now.last_step === null ? "none yet" : String(now.last_step), planned ? `of ${planned}` : "");
    const loss = now.figures.loss;
    if (loss !== null) {
      const less = typeof now.entropy === "number" && typeof loss === "number" ? now.entropy - loss : null;
      const against = less === null ? "" : `${figure(Math.abs(less))} ${less > 0 ? "below" : "above"} the entropy ${figure(now.entropy)}`;
      row("Loss", figure(loss), against);
    }
    if (now.figures.lr !== null) row("Learning rate", figure(now.figures.lr));
    if (now.figures["loss-scale"] !== null) row("Loss scale", figure(now.figures["loss-scale"]));
    if (now.step_seconds !== null) row("Step time", figure(now.step_seconds, 3) + " s", "median of the last 20");
    if (now.tokens_per_second !== null) row("Tokens per second", figure(now.tokens_per_second, 3));
    if (now.ranks.length > 1) row("Ranks", String(now.ranks.length), now.ranks.map((each) => `${each.rank}: ${each.state}, step ${each.last_step ?? "none"}`).slice(0, 8).join("; "));
    at("facts").replaceChildren(...rows);
    options(at("quantity"), now.quantities, now.quantity);
    at("of-rank").hidden = now.ranks.length < 2;
    options(at("rank"), ["", ...now.ranks.map((each) => String(each.rank))], at("rank").value);
  };
  const options = (select, names, value) => {
    if (select.options.length !== names.length || names.some((name, i) => select.options[i].value !== name))
      select.replaceChildren(...names.map((name) => new Option(name || `default (${now.rank})`, name)));
    select.value = value;
  };

  // Alarms, events, notes.

  const card = (alarm) => {
    const node = make("article", undefined, `alarm ${alarm.severity}`);
    const title = make("h3", `${alarm.name} `);
    title.append(make("small", `${alarm.code} · ${alarm.severity} · ${where(alarm)}${earlier(alarm)}`));
    node.append(title, make("p", alarm.message));
    if (alarm.remedy) {
      const remedy = make("p", undefined, "remedy");
      remedy.append(make("b", "Remedy"), alarm.remedy);
      node.append(remedy);
    }
    return node;
  };
  const lists = () => {
    const newest = alarms.slice(-MOST_CARDS).reverse();
    const left = alarms.length - newest.length;
    at("num-alarms").textContent = alarms.length ? `newest first` + (left ? `; ${left} earlier ones are at their pins above` : "") : "";
    at("alarms").replaceChildren(...(newest.length ? newest.map(card) : [make("p", "No alarms.", "empty")]));
    const said = events.slice(-MOST_EVENTS).reverse().map((event) => {
      const { sentence, ...data } = event.data;
      const words = typeof sentence === "string" ? sentence : Object.entries(data).map(([name, value]) => `${name}: ${typeof value === "object" ? JSON.stringify(value) : value}`).join(", ");
      const item = make("li");
      item.append(make("b", event.kind), ` ${where(event)}${earlier(event)}${words ? ": " + words : ""}`);
      return item;
    });
    const notes = (Array.isArray(now.notes) ? now.notes : []).map((note) => make("li", String(note)));
    const list = make("ul");
    list.append(...said, ...notes);
    at("events").replaceChildren(said.length + notes.length ? list : make("p", "None.", "empty"));
  };

  // Steps from left to right: a row of step s fills (s − 1, s].

  const place = {};
  const lay = () => {
    const width = at("curves").clientWidth;
    place.left = width > 700 ? 168 : 92;
    place.right = width - 10;
    const known = [now.loss, now.heat, now.against && now.against.loss].filter((each) => each && each.first.length);
    place.low = Math.min(...known.map((each) => each.first[0])) - 1;
    place.high = Math.max(...known.map((each) => each.last.at(-1)));
    place.width = width;
  };
  const across = (step) => place.left + ((step - place.low) / (place.high - place.low || 1)) * (place.right - place.left);
  const edges = (columns) => {
    const first = columns.first[0] - 1, spacing = columns.last.length > 1 ? columns.last[1] - columns.last[0] : 1;
    return [Math.max(place.low, Math.min(first, columns.last[0] - spacing)), ...columns.last].map(across);
  };
  const ticks = (low, high, most) => {
    const raw = (high - low) / most, unit = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 2.5, 5, 10].map((m) => m * unit).find((each) => each >= raw * 0.999);
    const found = [];
    for (let k = Math.ceil(low / step - 1e-9); k * step <= high + step * 1e-9; k += 1) found.push(Number((k * step).toPrecision(12)));
    return found;
  };
  const stepAxis = (svg, y) => {
    svg.append(drawn("line", { x1: place.left, x2: place.right, y1: y, y2: y, class: "axis" }));
    for (const tick of ticks(place.low, place.high, place.width > 700 ? 8 : 4)) {
      if (!Number.isInteger(tick) || tick <= place.low) continue;
      svg.append(drawn("text", { x: across(tick - 0.5), y: y + 14, "text-anchor": "middle" }, String(tick)));
    }
  };

  // Loss.

  const HEIGHT = 190, UPPER = 16, LOWER = 22;
  const finite = (columns, row) => columns.low[row].concat((columns.high || columns.low)[row]).filter((value) => value !== null);
  const drawLoss = () => {
    const svg = at("loss").querySelector("svg");
    svg.setAttribute("viewBox", `0 0 ${place.width} ${HEIGHT}`);
    svg.setAttribute("height", HEIGHT);
    svg.replaceChildren();
    const runs = [[now.loss, "run"], [now.against && now.against.loss, "good"]].filter(([each]) => each && each.first.length);
    const values = runs.flatMap(([each]) => finite(each, 0)).sort((a, b) => a - b);
    const level = typeof now.entropy === "number" ? now.entropy : null;
    if (level !== null) values.push(level);
    const usual = values[values.length >> 1], lowest = Math.min(...values), highest = Math.max(...values);
    const log = lowest > 0 && highest > 12 * usual;
    const axis = log ? Math.log10 : (value) => value;
    let [low, high] = values.length ? [axis(lowest), axis(highest)] : [0, 1];
    const pad = (high - low) * 0.05 || Math.abs(high) * 0.1 || 1;
    [low, high] = [low - pad, high + pad];
    const up = (value) => HEIGHT - LOWER - ((axis(value) - low) / (high - low)) * (HEIGHT - LOWER - UPPER);
    const marks = log ? powers(low, high) : ticks(low, high, 4);
    for (const tick of marks) {
      svg.append(drawn("line", { x1: place.left, x2: place.right, y1: up(tick), y2: up(tick), class: "grid" }));
      svg.append(drawn("text", { x: place.left - 8, y: up(tick) + 4, "text-anchor": "end" }, figure(tick, 3)));
    }
    stepAxis(svg, HEIGHT - LOWER);
    pinLines(svg, UPPER, HEIGHT - LOWER, true);
    if (level !== null) svg.append(drawn("line", { x1: place.left, x2: place.right, y1: up(level), y2: up(level), class: "level" }));
    for (const [columns, css] of runs.toReversed()) curve(svg, columns, css, up);
    const rescues = events.filter((each) => each.kind === "rescue" && each.step > place.low && each.step <= place.high);
    for (const step of new Set(rescues.map((each) => each.step))) {
      const x = across(step - 0.5);
      svg.append(drawn("path", { d: `M${x - 4},${HEIGHT - LOWER}h8l-4,-9z`, class: "rescue" }));
    }
    const key = [];
    const entry = (css, dashed, words) => {
      const node = make("span");
      node.append(make("i", "", css + (dashed ? " dashed" : "")), words);
      key.push(node);
    };
    if (now.against) { entry("of-run", false, at("name").textContent); entry("of-good", true, now.against.name); }
    if (level !== null) entry("of-level", true, `entropy of the targets, ${figure(level)}`);
    if (rescues.length) {
      const node = make("span");
      node.append(make("b", "▲ ", "of-rescue"), `rescue, ${many(rescues.length, "intervention")}`);
      key.push(node);
    }
    at("loss-key").replaceChildren(...key);
    if (!now.loss) return void (at("loss-words").textContent = "No loss was given to the monitor.");
    const broken = now.loss.broken;
    const span = now.loss.first.length ? `Steps ${now.loss.first[0]} to ${now.loss.last.at(-1)}: ` : "";
    const own = finite(now.loss, 0);
    at("loss-words").textContent = span + (own.length ? `from ${figure(Math.min(...own))} to ${figure(Math.max(...own))}` : "no finite value")
      + (broken.length ? `; × not finite, first at step ${broken[0][3]}` : "") + "."
      + (now.loss.width > 1 ? ` A column holds ${now.loss.width} steps, with their lowest and highest value.` : "") + (log ? " Log axis." : "");
  };
  const powers = (low, high) => {
    const found = [];
    const every = Math.max(1, Math.ceil((high - low) / 4));
    for (let power = Math.ceil(low); power <= high; power += every) found.push(10 ** power);
    return found.length > 1 ? found : [10 ** low, 10 ** high];
  };
  const curve = (svg, columns, css, up) => {
    const { first, last, low, broken } = columns, high = columns.high || low;
    const middle = first.map((step, i) => across((step + last[i]) / 2 - 0.5));
    let stretch = [];
    const end = () => {
      if (!stretch.length) return;
      const upper = stretch.map((i) => `${middle[i].toFixed(1)},${up(high[0][i]).toFixed(1)}`);
      const lower = columns.width > 1 ? stretch.toReversed().map((i) => `${middle[i].toFixed(1)},${up(low[0][i]).toFixed(1)}`) : [];
      if (stretch.length === 1) svg.append(drawn("circle", { cx: middle[stretch[0]], cy: up(high[0][stretch[0]]), r: 1.5, class: css }));
      svg.append(drawn("path", { d: "M" + upper.concat(lower).join("L") + (lower.length ? "Z" : ""), class: css + (lower.length ? " filled" : "") }));
      stretch = [];
    };
    low[0].forEach((value, i) => (value === null ? end() : stretch.push(i)));
    end();
    let before = -99;
    for (const [column, , value] of broken) {
      if (middle[column] - before < 9) continue;
      before = middle[column];
      svg.append(drawn("text", { x: before, y: value === "-inf" ? HEIGHT - LOWER - 2 : UPPER - 3, "text-anchor": "middle", class: "bad" }, "×"));
    }
  };

  // Alarms, pinned to both pictures.

  const groups = () => {
    const sorted = alarms.filter((each) => each.step > place.low && each.step <= place.high).sort((a, b) => a.step - b.step);
    const found = [];
    for (const alarm of sorted) {
      const x = across(alarm.step - 0.5), group = found.at(-1);
      if (group && x - group.x < 28) group.alarms.push(alarm);
      else found.push({ x, alarms: [alarm] });
    }
    return found;
  };
  const worst = (group) => ["error", "warning", "note"].find((each) => group.some((alarm) => alarm.severity === each));
  const pinLines = (svg, upper, lower, named = false) => {
    for (const group of groups()) {
      const lit = chosen !== null && group.alarms.some((each) => each.step === chosen);
      for (const step of new Set(group.alarms.map((each) => each.step))) {
        const x = across(step - 0.5), severity = worst(group.alarms.filter((each) => each.step === step));
        svg.append(drawn("line", { x1: x, x2: x, y1: upper, y2: lower, class: `pin ${severity}${lit ? " lit" : ""}` }));
      }
    }
    const parted = now.against && now.against.parting.step;
    if (!parted) return;
    const x = across(parted - 0.5), late = x > (place.left + place.right) / 2;
    svg.append(drawn("line", { x1: x, x2: x, y1: upper, y2: lower, class: "parting" }));
    if (named) svg.append(drawn("text", { x: x + (late ? -6 : 6), y: upper + 9, "text-anchor": late ? "end" : "start", class: "parted" }, `they part at step ${parted}`));
  };
  const pins = () => {
    const focused = document.activeElement && document.activeElement.dataset.step;
    const buttons = groups().map(({ x, alarms }) => {
      const severity = worst(alarms), steps = [alarms[0].step, alarms.at(-1).step];
      const node = make("button", alarms.length > 1 ? String(alarms.length) : { error: "×", warning: "!", note: "i" }[severity], severity);
      node.type = "button";
      node.style.left = `${clamp(x, 12, place.width - 12)}px`;
      node.dataset.step = String(steps[0]);
      const said = alarms.length > 1 ? `${many(alarms.length, "alarm")}, steps ${steps[0]} to ${steps[1]}` : `step ${steps[0]}: ${alarms[0].code} ${alarms[0].name}, ${severity}`;
      node.setAttribute("aria-label", said);
      node.title = said;
      node.setAttribute("aria-pressed", String(chosen !== null && alarms.some((each) => each.step === chosen)));
      node.addEventListener("click", () => choose(alarms));
      node.addEventListener("focus", () => { if (chosen !== alarms[0].step) choose(alarms); });
      return node;
    });
    at("rail").replaceChildren(...(buttons.length ? buttons : [make("p", "No alarms.")]));
    if (focused) for (const button of buttons) if (button.dataset.step === focused) button.focus({ preventScroll: true });
  };
  const choose = (group) => {
    chosen = group[0].step;
    at("chosen").replaceChildren(...group.slice(-8).map(card));
    if (group.length > 8) at("chosen").append(make("p", `${group.length - 8} more at these steps are in the list below.`, "words"));
    for (const button of at("rail").querySelectorAll("button")) button.setAttribute("aria-pressed", String(button.dataset.step === String(chosen)));
    drawLoss();
    drawHeat();
  };

  // Heat map.

  const COLOURS = at("head").dataset.colours.split(" ");
  const CHOICES = { value: "values", own: "relative to each site's median", ratio: "one run beside the other" };
  const rgb = (hex) => [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
  const mixer = (stops) => {
    const parts = stops.map(rgb);
    return (share) => {
      const place = clamp(share, 0, 1) * (parts.length - 1), i = Math.min(parts.length - 2, Math.floor(place));
      return "rgb(" + parts[i].map((low, k) => Math.round(low + (parts[i + 1][k] - low) * (place - i))).join(",") + ")";
    };
  };
  const middleOf = (values) => values.slice().sort((a, b) => a - b)[values.length >> 1];
  let shown = null;
  const measure = (columns, way) => {
    const high = columns.high || columns.low;
    const every = columns.low.flatMap((row, i) => finite(columns, i));
    const log = way !== "ratio" && every.length > 0 && every.every((value) => value > 0);
    const scale = (value) => (value === null ? null : log ? Math.log2(value) : value);
    const cells = columns.low.map((row, i) => {
      const low = row.map(scale), top = columns.high ? high[i].map(scale) : low;
      const known = low.filter((value) => value !== null).concat(columns.high ? top.filter((value) => value !== null) : []);
      const usual = known.length ? middleOf(known) : 0;
      const zero = way === "ratio" ? 0 : usual;
      return low.map((value, j) => {
        if (value === null) return null;
        const far = Math.abs(top[j] - zero) > Math.abs(value - zero) ? top[j] : value;
        return way === "own" ? far - usual : far;
      });
    });
    const all = cells.flat().filter((value) => value !== null).sort((a, b) => a - b);
    const share = (p) => all[Math.min(all.length - 1, Math.floor(p * all.length))];
    let low = all[0] ?? 0, high_ = all.at(-1) ?? 1;
    let clipped = [false, false];
    if (way === "value") {
      // A single value of 1e30 must not take all colours from the others.
      const spread = Math.max(share(0.98) - share(0.02), log ? 1 : Math.abs(share(0.5)) * 0.1) * 2;
      clipped = [low < share(0.02) - spread, high_ > share(0.98) + spread];
      if (clipped[0]) low = share(0.02) - spread;
      if (clipped[1]) high_ = share(0.98) + spread;
    } else {
      const most = Math.max(Math.abs(low), Math.abs(high_)), usual = Math.max(-share(0.02), share(0.98)) * 4, least = log || (way === "ratio" && !now.against.is_linear) ? 1 : 1e-12;
      const end = Math.max(Math.min(most, Math.max(usual, least)), least);
      clipped = [-low > end, high_ > end];
      [low, high_] = [-end, end];
    }
    return { cells, low, high: high_, log, clipped, way };
  };
  const words = (value, found) => (found.way === "ratio" ? beside(value) : found.way === "own" && found.log ? times(value) : found.log ? figure(2 ** value) : figure(value));
  const pictured = () => {
    const way = at("colouring").value || "value";
    return way === "ratio" && now.against && now.against.heat ? [now.against.heat, now.against.sites, way] : [now.heat, now.sites, way === "ratio" ? "value" : way];
  };
  const drawHeat = () => {
    const ways = now.against && now.against.heat ? ["ratio", "value", "own"] : ["value", "own"];
    const select = at("colouring"), value = select.value;
    if (select.options.length !== ways.length) {
      select.replaceChildren(...ways.map((way) => new Option(CHOICES[way], way)));
      select.value = ways.includes(value) && value ? value : ways[0];
    }
    const [columns, sites, way] = pictured();
    const canvas = at("heat").querySelector("canvas"), svg = at("heat").querySelector("svg");
    svg.replaceChildren();
    at("heat").hidden = at("figures").hidden = !columns || !columns.first.length;
    at("legend").replaceChildren();
    if (at("heat").hidden) {
      at("reading").textContent = "";
      at("heat-words").textContent = now.quantities.length ? "No row has this quantity yet." : "No row of all sites yet.";
      shown = null;
      return;
    }
    const found = measure(columns, way);
    const tall = clamp(Math.floor(440 / sites.length), 3, 28), height = tall * sites.length, edge = edges(columns);
    shown = { columns, sites, found, tall, height, edge };
    const dots = devicePixelRatio || 1, wide = place.right - place.left;
    canvas.width = Math.round(wide * dots);
    canvas.height = Math.round(height * dots);
    Object.assign(canvas.style, { left: `${place.left}px`, top: "4px", width: `${wide}px`, height: `${height}px` });
    const pen = canvas.getContext("2d");
    pen.scale(dots, dots);
    const mix = found.way === "value" ? mixer(COLOURS) : mixer([..."012345678"].map((k) => colour(`--g${k}`)));
    const range = found.high - found.low || 1;
    const snapped = edge.map((x) => Math.round((x - place.left) * dots) / dots); // fractions of a dot would blend into stripes
    found.cells.forEach((row, i) => row.forEach((value, j) => {
      if (value === null) return;
      pen.fillStyle = mix(found.high > found.low ? (value - found.low) / range : 0.5);
      pen.fillRect(snapped[j], i * tall, Math.max(1 / dots, snapped[j + 1] - snapped[j]), tall - (tall > 6 ? 1 : 0));
    }));
    pen.fillStyle = stripes(pen);
    for (const [j, i] of columns.broken) {
      const wideCell = Math.max(4, edge[j + 1] - edge[j]);
      pen.fillRect(Math.min(edge[j] - place.left, wide - wideCell), i * tall, wideCell, tall - (tall > 6 ? 1 : 0));
    }
    svg.setAttribute("viewBox", `0 0 ${place.width} ${height + 26}`);
    svg.setAttribute("height", height + 26);
    const letters = Math.floor((place.left - 12) / 6.7), every = Math.ceil(12 / tall);
    sites.forEach((site, i) => {
      if (i % every) return;
      const name = site.length <= letters ? site : "…" + site.slice(1 - letters);
      const node = drawn("text", { x: place.left - 8, y: 4 + (i + 0.5) * tall + 3.5, "text-anchor": "end", class: "site" }, name);
      node.append(drawn("title", {}, site));
      svg.append(node);
    });
    const parts = drawn("g", {});
    stepAxis(parts, height + 5);
    svg.append(parts);
    pinLines(svg, 4, height + 4);
    legend(found, columns);
    const broken = columns.broken.slice().sort((a, b) => a[3] - b[3] || a[1] - b[1]);
    at("heat-words").textContent = `${now.quantity}, ${many(sites.length, "site")}, steps ${columns.first[0]} to ${columns.last.at(-1)}.`
      + (broken.length ? ` Not finite: ${many(broken.length, "cell")}, the first at step ${broken[0][3]} in ${sites[broken[0][1]]}.` : "")
      + (columns.width > 1 ? ` A column holds ${columns.width} rows and shows the one farthest from the usual.` : "")
      + (found.way === "ratio" ? ` ${now.against.is_linear ? "Difference" : "Ratio"} of ${at("name").textContent} ${now.against.is_linear ? "and" : "to"} ${now.against.name}, on the steps of both.` : "");
    read();
    if (at("figures").open) table();
  };
  const stripes = (pen) => {
    const tile = document.createElement("canvas");
    tile.width = tile.height = 5;
    const brush = tile.getContext("2d");
    brush.fillStyle = colour("--paper");
    brush.fillRect(0, 0, 5, 5);
    brush.fillStyle = colour("--error");
    for (let y = 0; y < 5; y += 1) for (const x of [0, 1, 2]) brush.fillRect((x - y + 5) % 5, y, 1, 1);
    return pen.createPattern(tile, "repeat");
  };
  const legend = (found, columns) => {
    const bar = make("span", undefined, "bar"), ramp = make("i");
    const stops = found.way === "value" ? COLOURS : [..."012345678"].map((k) => `var(--g${k})`);
    ramp.style.background = `linear-gradient(90deg, ${stops.join(", ")})`;
    bar.append((found.clipped[0] ? "≤ " : "") + words(found.low, found), ramp, (found.clipped[1] ? "≥ " : "") + words(found.high, found));
    const parts = columns.low.some((row) => row.some((value) => value !== null)) ? [bar] : [];
    if (found.log || (found.way === "ratio" && !now.against.is_linear)) parts.push(make("span", "log scale"));
    const box = (css, said) => {
      const node = make("span");
      node.append(make("i", "", `box ${css}`), said);
      parts.push(node);
    };
    if (columns.broken.length) box("broken", "not finite");
    if (found.cells.some((row, i) => row.some((value, j) => value === null && !columns.broken.some(([c, s]) => c === j && s === i)))) box("", "not measured");
    at("legend").replaceChildren(...parts);
  };

  // The reading: one cell in words, under the pointer or moved by the arrow keys.

  const read = () => {
    for (const node of at("heat").querySelectorAll(".cursor, .halo")) node.remove();
    if (!shown || !reading) {
      at("reading").textContent = shown ? "Point at a cell, or focus the map and use the arrow keys, to read it." : "";
      return;
    }
    const { columns, sites, found, tall, edge } = shown;
    const j = (reading.column = clamp(reading.column, 0, columns.first.length - 1)), i = (reading.site = clamp(reading.site, 0, sites.length - 1));
    const box = { x: edge[j], y: 4 + i * tall, width: Math.max(3, edge[j + 1] - edge[j]), height: tall };
    at("heat").querySelector("svg").append(drawn("rect", { ...box, class: "halo" }), drawn("rect", { ...box, class: "cursor" }));
    const steps = columns.first[j] === columns.last[j] ? `Step ${columns.last[j]}` : `Steps ${columns.first[j]} to ${columns.last[j]}`;
    const say = found.way === "ratio" ? beside : figure;
    const low = columns.low[i][j], high = columns.high ? columns.high[i][j] : low;
    const bad = columns.broken.find(([c, s]) => c === j && s === i);
    const value = low === null ? "" : low === high ? say(low) : `${say(low)} to ${say(high)}`;
    const said = [bad ? `${figure(bad[2])} at step ${bad[3]}` : "", value].filter(Boolean).join(", else ") || "not measured";
    at("reading").textContent = `${steps}, ${sites[i]}: ${said}` + (low !== null && found.way === "own" ? `, ${words(found.cells[i][j], found)} of its median` : "") + ".";
  };
  const point = (event) => {
    if (!shown) return;
    const box = at("heat").getBoundingClientRect(), x = event.clientX - box.left, y = event.clientY - box.top - 4;
    if (x < place.left || x > place.right || y < 0 || y > shown.height) return;
    const column = shown.edge.findIndex((edge, k) => k > 0 && x <= edge) - 1;
    reading = { column: Math.max(0, column), site: Math.floor(y / shown.tall) };
    read();
  };
  at("heat").addEventListener("pointermove", point);
  at("heat").addEventListener("pointerdown", point);
  at("heat").addEventListener("keydown", (event) => {
    const moves = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1], PageUp: [-10, 0], PageDown: [10, 0], Home: [-1e9, 0], End: [1e9, 0] };
    const move = moves[event.key];
    if (!move || !shown) return;
    event.preventDefault();
    reading = reading ? { column: reading.column + move[0], site: reading.site + move[1] } : { column: shown.columns.first.length - 1, site: 0 };
    read();
  });
  const table = () => {
    if (!shown) return;
    const { columns, sites, found } = shown, say = found.way === "ratio" ? beside : figure;
    const rows = sites.map((site, i) => {
      const known = finite(columns, i), bad = columns.broken.filter(([, s]) => s === i).sort((a, b) => a[0] - b[0]);
      const end = columns.first.length - 1, lastBad = bad.find(([c]) => c === end);
      const last = lastBad ? figure(lastBad[2]) : columns.low[i][end] === null ? "not measured" : say((columns.high || columns.low)[i][end]);
      const row = make("tr");
      row.append(make("th", site), make("td", last), make("td", known.length ? say(Math.min(...known)) : ""), make("td", known.length ? say(Math.max(...known)) : ""),
        make("td", bad.length ? `from step ${bad[0][3]}` : ""));
      return row;
    });
    const names = make("tr");
    names.append(...["site", "last", "lowest", "highest", "not finite"].map((name) => make("th", name)));
    at("figures").querySelector("thead").replaceChildren(names);
    at("figures").querySelector("tbody").replaceChildren(...rows);
  };
  at("figures").addEventListener("toggle", table);

  const draw = () => {
    if (!now) return;
    at("loss").hidden = ![now.loss, now.against?.loss].some((each) => each && (finite(each, 0).length || each.broken.length));
    if (!now.loss && !now.heat) {
      at("loss-words").textContent = "No step yet.";
      at("rail").replaceChildren();
      return drawHeat();
    }
    lay();
    if (at("loss").hidden) at("loss-words").textContent = "No loss was given to the monitor.";
    else drawLoss();
    pins();
    drawHeat();
  };
  at("quantity").addEventListener("change", () => { reading = null; poll(); });
  at("rank").addEventListener("change", () => { reading = null; poll(); });
  at("colouring").addEventListener("change", () => { drawHeat(); });
  new ResizeObserver(() => { if (now && at("curves").clientWidth !== place.width) draw(); }).observe(at("main"));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  document.addEventListener("visibilitychange", () => { if (!document.hidden) poll(); });
  poll();
})();
