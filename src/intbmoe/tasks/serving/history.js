// A form for a history of items or journeys, from old to new; the rest of the page is in serve/.
forms["history"] = {
  build(fields, schema) {
    this.schema = schema;
    const item = schema.properties.history.items;
    const named = item.type === "string";
    this.simple = named || item.type === "integer";
    this.history = make("ol", { className: "chips" });
    this.history.setAttribute("aria-label", "The history, from old to new");
    const add = make("button", { type: "button", id: "add", textContent: "Add" });
    const entry = make("fieldset", {}, make("legend", {}, this.simple ? "Add to the history" : "Add a journey"));
    if (this.simple) {
      this.item = named ? make("input", { name: "item", value: schema.examples[0].history[0] }) : number("item", item, item.minimum);
      const label = named ? "Item " : `Item, ${item.minimum} to ${item.maximum} `;
      entry.append(make("div", { className: "row" }, make("label", {}, label, this.item), add));
      add.addEventListener("click", () => {
        if (this.item.reportValidity()) this.append(named ? this.item.value : Number(this.item.value));
      });
    } else {
      this.entry = record("history", item);
      entry.append(this.entry.element, make("div", { className: "row" }, add));
      add.addEventListener("click", () => this.append(this.entry.read()));
    }
    fields.append(make("p", { className: "hint", textContent: schema.properties.history.description ?? "" }),
      this.history, entry);
    this.others = {};
    for (const name of ["now", "profile"]) {
      if (!schema.properties[name]) continue;
      const other = this.others[name] = record(name, schema.properties[name]);
      const box = make("details", { open: name === "now" }, make("summary", {}, name === "now" ? "Now" : "Profile"), other.element);
      fields.append(make("fieldset", {}, box));
    }
    const visited = make("select", { name: "visited" }, ...(schema.properties.visited?.enum ?? ["allow"]).map((word) => make("option", {}, word)));
    fields.append(make("div", { className: "row" },
      make("label", {}, "How many ", number("top_n", schema.properties.top_n)),
      ...(schema.properties.visited ? [make("label", {}, "Already in the history ", visited)] : [])));
    this.example(schema.examples[0]);
  },
  append(value) {
    const text = this.simple ? String(value) : `${shortTime(value.time)} → ${value.place ?? "?"}`;
    const chip = make("button", { type: "button", textContent: text + " ×", title: "Remove " + text });
    chip.setAttribute("aria-label", "Remove " + text);
    const line = make("li", {}, chip);
    line.value_ = value;
    chip.addEventListener("click", () => { line.remove(); $("go").focus(); });
    this.history.append(line);
  },
  example(example) {
    this.history.replaceChildren();
    for (const value of example.history) this.append(value);
    for (const [name, other] of Object.entries(this.others)) other.write(example[name] ?? {});
    if (this.entry && example.history.length) this.entry.write(example.history[example.history.length - 1]);
  },
  request() {
    const form = $("form").elements, found = { history: [...this.history.children].map((line) => line.value_) };
    for (const [name, other] of Object.entries(this.others)) found[name] = other.read();
    found.top_n = Number(form.top_n.value);
    if (form.visited) found.visited = form.visited.value;
    return found;
  },
  show(answer) {
    showResults(answer);
    for (const [name, title] of [["how", "How"], ["when", "When"]]) {
      const found = (answer[name] ?? []).filter((one) => one.score >= 0.005);
      if (found.length) $("answer").append(make("p", {}, make("strong", {}, title + ": "), found.map(likely).join(", ")));
    }
    if (!answer.viewport) return;
    document.querySelectorAll(".results .bar + span").forEach((name, at) => name.prepend(`${at + 1}. `));
    $("answer").append(drawMap(answer));
  },
};

function likely(one) {
  const hours = one.hours === 0 ? "within the hour" : one.hours >= 48 ? "in two days or never" : `in ${one.hours} h`;
  return `${one.hours === undefined ? "mode " + one.id : hours} (${Math.round(100 * one.score)} %)`;
}

// Draws the places as numbered points, without a map behind them: longitudes shrink with the cosine of the latitude,
// and a viewport that crosses the antimeridian continues beyond 180°.
function drawMap({ results, viewport }) {
  const KM = 111.195, WIDTH = 320, EDGE = 22, degrees = (d) => (d * Math.PI) / 180;
  const wide = (longitude) => (longitude - viewport.west + 360) % 360;
  const shrink = Math.max(0.01, Math.cos(degrees((viewport.south + viewport.north) / 2)));
  const across = wide(viewport.east) * shrink * KM, along = (viewport.north - viewport.south) * KM;
  const shown = Math.max(across, along, 0.1);  // kilometres of the longer side
  const scale = (WIDTH - 2 * EDGE) / shown, height = Math.max(along * scale, 60) + 2 * EDGE + 22;
  const left = (WIDTH - across * scale) / 2, top = (height - 22 - along * scale) / 2;
  const draw = (tag, attributes, ...inside) => {
    const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    element.append(...inside);
    return element;
  };
  const points = results.map((one, at) => [one, at + 1]).filter(([one]) => one.longitude !== undefined);
  const size = (km) => (km >= 1 ? `${Number(km.toPrecision(2))} km` : `${Math.round(km * 1000)} m`);
  const map = draw("svg", { viewBox: `0 0 ${WIDTH} ${height}`, class: "map", role: "img",
    "aria-label": `A map of ${points.length} places, ${size(across)} by ${size(along)}` });
  for (const [one, rank] of points.reverse()) {  // the best is drawn on top
    const x = left + wide(one.longitude) * shrink * KM * scale, y = top + (viewport.north - one.latitude) * KM * scale;
    map.append(draw("g", { transform: `translate(${x.toFixed(1)} ${y.toFixed(1)})` },
      draw("title", {}, `${rank}. ${one.name ?? one.id}: ${one.latitude.toFixed(5)}, ${one.longitude.toFixed(5)}`),
      draw("circle", { r: 9 }), draw("text", { dy: ".35em" }, String(rank))));
  }
  const most = (WIDTH / 3) / scale, power = 10 ** Math.floor(Math.log10(most));
  const length = power * [5, 2, 1].find((step) => step * power <= most), y = height - 8;
  map.append(draw("path", { class: "scale", d: `M ${EDGE} ${y - 5} V ${y} H ${(EDGE + length * scale).toFixed(1)} V ${y - 5}` }),
    draw("text", { class: "scale", x: EDGE + length * scale + 6, y }, size(length)));
  return map;
}

function shortTime(time) { return time === undefined ? "?" : new Date(time).toISOString().slice(0, 16).replace("T", " "); }

function record(where, schema) {
  const inputs = {}, grid = make("div", { className: "grid" });
  for (const [name, field] of Object.entries(schema.properties ?? {})) {
    const input = name === "time" ? make("input", { type: "datetime-local" }) : number("", field);
    input.setAttribute("aria-label", `${where}: ${name}`);
    inputs[name] = input;
    grid.append(make("label", { title: field.description ?? "", className: name === "time" ? "wide" : "" }, name === "time" ? "time (UTC)" : name, input));
  }
  return {
    element: grid,
    read() {
      const found = {};
      for (const [name, input] of Object.entries(inputs)) {
        if (input.value === "") continue;
        found[name] = name === "time" ? Date.parse(input.value + "Z") : Number(input.value);
      }
      return found;
    },
    write(values) {
      for (const [name, input] of Object.entries(inputs)) {
        const value = values[name];
        input.value = value === undefined || value === null ? "" : name === "time" ? new Date(value).toISOString().slice(0, 16) : value;
      }
    },
  };
}
