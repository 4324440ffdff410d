// The sliders of the report: the same formulas as the planner's, on the numbers that stand in the page. No network.
"use strict";
(function () {
  const data = JSON.parse(document.getElementById("data").textContent);
  const names = ["context", "batch", "format", "heads", "hardware"];
  const byId = (id) => document.getElementById(id);

  // -- arithmetic

  function storedBytes(numbers, stored) {
    return Math.ceil(numbers / stored.numbers) * stored.num_bytes + stored.extra;
  }

  function entryBytes(group, format, heads) {
    if (group.kind === "index") return group.index_bytes;
    const kvHeads = group.v_head_dim && heads ? heads : group.num_kv_heads;
    let each = storedBytes(group.head_dim, (group.format || format).k);
    if (group.v_head_dim) each += storedBytes(group.v_head_dim, (group.format || format).v);
    return kvHeads * each;
  }

  function entries(group, tokens, limit) {
    if (group.kind === "state") return 0;
    return Math.floor((limit === null ? tokens : Math.min(tokens, limit)) / group.tokens_per_entry);
  }

  function seen(group) {
    const limits = [group.window, group.read_tokens].filter((limit) => limit !== null);
    return limits.length ? Math.min(...limits) : null;
  }

  function cacheBytes(tokens, sequences, format, heads, reading) {
    return sequences * data.groups.reduce((sum, group) => sum + group.layers
      * (entryBytes(group, format, heads) * entries(group, tokens, reading ? seen(group) : group.window)
        + group.state_bytes), 0);
  }

  function bytesPerToken(format, heads) {
    return data.groups.reduce((sum, group) => sum + (group.kind === "state" ? 0
      : entryBytes(group, format, heads) * group.layers / group.tokens_per_entry), 0);
  }

  function crossover(sequences, format, heads) {
    if (!data.weights_bytes) return null;
    let high = 1;
    while (cacheBytes(high, sequences, format, heads, false) < data.weights_bytes) {
      if (high > 2 ** 44) return null;
      high *= 2;
    }
    let low = Math.floor(high / 2);
    while (low + 1 < high) {
      const middle = Math.floor((low + high) / 2);
      if (cacheBytes(middle, sequences, format, heads, false) >= data.weights_bytes) high = middle; else low = middle;
    }
    return high;
  }

  function weightsRead(batch) {
    return Math.round(data.weights_bytes * data.read_shares.reduce((sum, part) => sum
      + part.share * (part.copies === 1 ? 1 : 1 - (1 - part.used / part.copies) ** batch), 0));
  }

  function multiplyAdds(batch, context) {
    const attention = data.groups.reduce((sum, group) => sum
      + group.per_key * group.layers * entries(group, context, seen(group)), 0);
    return batch * (data.per_row + data.head + attention);
  }

  function step(batch, asked) {
    const weights = weightsRead(batch);
    const kv = cacheBytes(asked.context, batch, asked.format, asked.heads, true);
    const found = { bytes: weights + kv, kv, weights, work: multiplyAdds(batch, asked.context) };
    if (asked.hardware) {
      found.seconds = Math.max(found.bytes / asked.hardware.bandwidth_bytes_s, 2 * found.work / asked.hardware.flops);
      found.by = found.seconds > found.bytes / asked.hardware.bandwidth_bytes_s ? "arithmetic" : "memory";
    }
    return found;
  }

  function asked() {
    const at = (name) => data.choices[name][Number(byId(name).value)];
    return { context: at("context"), batch: at("batch"), format: at("format"), heads: at("heads").kv_heads,
      hardware: at("hardware").bandwidth_bytes_s ? at("hardware") : null };
  }

  function plan() {
    const is = asked();
    const one = step(is.batch, is);
    const each = cacheBytes(is.context, 1, is.format, is.heads, false);
    const budget = is.hardware ? Math.floor(is.hardware.memory_bytes * data.memory_share) - data.weights_bytes : null;
    return {
      context: is.context, batch: is.batch,
      kv_bytes_per_token: bytesPerToken(is.format, is.heads),
      kv_bytes: cacheBytes(is.context, is.batch, is.format, is.heads, false),
      weights_bytes: data.weights_bytes,
      crossover_tokens: crossover(is.batch, is.format, is.heads),
      bytes_read_per_token: Math.round(one.bytes / is.batch),
      max_sequences: budget === null ? null : budget <= 0 ? 0 : Math.floor(budget / each),
      bound_tokens_per_s: one.seconds ? is.batch / one.seconds : null,
      bound_by: one.by || null,
    };
  }

  // -- words

  function showBytes(value) {
    const units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let unit = 0;
    while (value >= 1024 && unit < units.length - 1) { value /= 1024; unit += 1; }
    return (unit === 0 ? Math.round(value) : Number(value.toPrecision(4))) + " " + units[unit];
  }

  const showCount = (value) => value.toLocaleString("en-US", { maximumFractionDigits: 1 });

  function cell(kind, text) {
    const made = document.createElement(kind);
    made.textContent = text;
    return made;
  }

  function fill(table, caption, head, rows) {
    table.replaceChildren();
    table.append(cell("caption", caption));
    const section = document.createElement("thead");
    const top = document.createElement("tr");
    head.forEach((name) => { const made = cell("th", name); made.scope = "col"; top.append(made); });
    section.append(top);
    const body = document.createElement("tbody");
    rows.forEach((row) => {
      const line = document.createElement("tr");
      row.forEach((text) => line.append(cell("td", text)));
      body.append(line);
    });
    table.append(section, body);
  }

  function figure(list, name, value, more) {
    const box = document.createElement("div");
    box.append(cell("dt", name));
    const made = cell("dd", value);
    if (more) made.append(cell("small", more));
    box.append(made);
    list.append(box);
  }

  function showFigures(is, found) {
    const list = byId("figures");
    list.replaceChildren();
    figure(list, "Cache of one token", showBytes(found.kv_bytes_per_token), found.kv_bytes_per_token + " bytes");
    figure(list, "Cache", showBytes(found.kv_bytes),
      `${showCount(is.batch)} x ${showCount(is.context)} tokens, ${found.kv_bytes} bytes`);
    figure(list, "Weights", data.weights_bytes ? showBytes(data.weights_bytes) : "not known", data.weights_name);
    figure(list, "Cache outweighs weights from", found.crossover_tokens === null ? "never"
      : showCount(found.crossover_tokens) + " tokens", `in each of ${showCount(is.batch)} sequences`);
    figure(list, "Read for each new token", showBytes(found.bytes_read_per_token), "weights shared by the batch");
    if (is.hardware) {
      figure(list, "Sequences that fit", showCount(found.max_sequences), `of ${showCount(is.context)} tokens on one `
        + is.hardware.name);
      figure(list, "Tokens a second, at most", showCount(found.bound_tokens_per_s), `bound by ${found.bound_by}; `
        + is.hardware.source);
    }
  }

  function showFormats(is) {
    const own = cacheBytes(is.context, is.batch, is.format, is.heads, false);
    fill(byId("formats"), "The same cache in other formats", ["format", "a token", "cache", "relative"],
      data.choices.format.map((format) => {
        const bytes = cacheBytes(is.context, is.batch, format, is.heads, false);
        return [format.name, showBytes(bytesPerToken(format, is.heads)), showBytes(bytes),
          own ? (bytes / own).toFixed(3) : "-"];
      }));
  }

  function showBatches(is) {
    const head = ["batch", "cache", "read a token"].concat(is.hardware ? ["ms a step", "tokens/s", "bound by"] : []);
    fill(byId("batches"), is.hardware ? `Bounds on ${is.hardware.name}` : "Choose hardware for bounds of time", head,
      data.choices.batch.map((batch) => {
        const one = step(batch, is);
        const row = [showCount(batch), showBytes(one.kv), showBytes(one.bytes / batch)];
        return is.hardware ? row.concat([(one.seconds * 1000).toPrecision(4), showCount(batch / one.seconds), one.by])
          : row;
      }));
  }

  // -- the chart

  const space = "http://www.w3.org/2000/svg";

  function draw(parent, kind, attributes, text) {
    const made = document.createElementNS(space, kind);
    Object.entries(attributes).forEach(([name, value]) => made.setAttribute(name, value));
    if (text !== undefined) made.textContent = text;
    parent.append(made);
    return made;
  }

  function showChart(is) {
    const chart = byId("chart");
    chart.replaceChildren();
    const points = data.choices.context.map((context) => [context,
      cacheBytes(context, is.batch, is.format, is.heads, false)]).filter((point) => point[1] > 0);
    if (!points.length) return;
    const levels = data.weights_bytes ? [data.weights_bytes] : [];
    const values = points.map((point) => point[1]).concat(levels);
    const ends = { x: [points[0][0], points[points.length - 1][0]], y: [Math.min(...values), Math.max(...values)] };
    if (ends.y[0] === ends.y[1]) ends.y = [ends.y[0] / 2, ends.y[1] * 2];
    const along = (value, low, high) => Math.log(value / low) / Math.log(high / low);
    const x = (value) => 80 + 540 * along(value, ends.x[0], ends.x[1]);
    const y = (value) => 20 + 270 * (1 - along(value, ends.y[0], ends.y[1]));
    for (let power = Math.ceil(Math.log2(ends.y[0])), last = Math.log2(ends.y[1]),
      by = Math.max(1, Math.ceil((last - power) / 6)); power <= last; power += by) {
      draw(chart, "line", { x1: 80, x2: 620, y1: y(2 ** power), y2: y(2 ** power), stroke: "var(--faint)" });
      draw(chart, "text", { x: 74, y: y(2 ** power) + 4, "text-anchor": "end" }, showBytes(2 ** power));
    }
    points.forEach(([context], index) => {
      if (index % 2) return;
      draw(chart, "text", { x: x(context), y: 310, "text-anchor": "middle" },
        context < 1024 ? context : context < 1048576 ? context / 1024 + "K" : context / 1048576 + "M");
    });
    draw(chart, "text", { x: 350, y: 332, "text-anchor": "middle" }, "tokens of a sequence");
    draw(chart, "polyline", { points: points.map((point) => `${x(point[0])},${y(point[1])}`).join(" "), fill: "none",
      stroke: "var(--blue)", "stroke-width": 3 });
    levels.forEach((level) => {
      draw(chart, "line", { x1: 80, x2: 620, y1: y(level), y2: y(level), stroke: "var(--red)", "stroke-width": 2,
        "stroke-dasharray": "6 4" });
      draw(chart, "text", { x: 84, y: y(level) - 6 }, "weights");
    });
    const bytes = cacheBytes(is.context, is.batch, is.format, is.heads, false);
    if (bytes > 0) draw(chart, "circle", { cx: x(is.context), cy: y(bytes), r: 6, fill: "var(--blue)" });
    byId("chart-words").textContent = `At ${showCount(is.context)} tokens and batch ${showCount(is.batch)} the cache has `
      + showBytes(bytes) + (data.weights_bytes ? `, ${(bytes / data.weights_bytes).toPrecision(3)} times the weights.`
        : ".");
  }

  function show() {
    const is = asked();
    names.forEach((name) => {
      const choice = data.choices[name][Number(byId(name).value)];
      const text = typeof choice === "number" ? showCount(choice) : choice.name;
      byId(name + "-shown").textContent = text;
      byId(name).setAttribute("aria-valuetext", text);
    });
    showFigures(is, plan());
    showChart(is);
    showFormats(is);
    showBatches(is);
  }

  names.forEach((name) => {
    byId(name).max = data.choices[name].length - 1;
    byId(name).value = data.start[name];
    byId(name).addEventListener("input", show);
  });
  window.octavoPlan = plan;
  show();
}());
