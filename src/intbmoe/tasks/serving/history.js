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
      ...(schema.properties.visited ? [make("label", {}, "Those of the history ", visited)] : [])));
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
  show: showResults,
};

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
