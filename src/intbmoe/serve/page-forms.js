"use strict";
// A form for each action: how it is built, what it asks, and what of the answer it shows. The rest is in page.js.
function number(name, schema, value) {
  const input = make("input", { type: "number", name, min: schema.minimum ?? "", max: schema.maximum ?? "",
    step: schema.type === "number" ? "any" : 1, value: value ?? schema.default ?? "" });
  input.required = value !== undefined || schema.default !== undefined;
  return input;
}

const actions = {
  classify: {
    build(fields, schema) {
      const canvas = make("canvas", { id: "draw", width: 280, height: 280 });
      canvas.setAttribute("role", "img");
      canvas.setAttribute("aria-label", "Your image. Draw with a finger or the mouse, or choose a file below.");
      const pen = canvas.getContext("2d");
      this.clear = () => { pen.fillStyle = "#000"; pen.fillRect(0, 0, 280, 280); };
      this.clear();
      let last = null;
      const at = (event) => {
        const box = canvas.getBoundingClientRect();
        return [(event.clientX - box.left) * 280 / box.width, (event.clientY - box.top) * 280 / box.height];
      };
      canvas.addEventListener("pointerdown", (event) => { canvas.setPointerCapture(event.pointerId); last = at(event); });
      canvas.addEventListener("pointerup", () => { last = null; });
      canvas.addEventListener("pointermove", (event) => {
        if (!last) return;
        const next = at(event);
        Object.assign(pen, { strokeStyle: "#fff", lineWidth: 44, lineCap: "round" });
        pen.beginPath(); pen.moveTo(...last); pen.lineTo(...next); pen.stroke();
        last = next;
      });
      const file = make("input", { type: "file", accept: "image/png,image/jpeg", id: "file" });
      file.addEventListener("change", () => { if (file.files[0]) this.put(URL.createObjectURL(file.files[0])); });
      const wipe = make("button", { type: "button", textContent: "Clear" });
      wipe.addEventListener("click", () => { this.clear(); file.value = ""; });
      fields.append(make("div", { className: "picture" }, canvas),
        make("div", { className: "row" }, make("label", {}, "Or a file ", file), wipe,
          make("label", {}, "How many classes ", number("top_n", schema.properties.top_n))));
      this.canvas = canvas;
      return this.put("data:image/png;base64," + schema.examples[0].image);
    },
    put(source) {
      return new Promise((resolve, reject) => {
        const image = new Image();
        image.onload = () => {
          const side = Math.min(image.width, image.height), pen = this.canvas.getContext("2d");
          this.clear();
          pen.imageSmoothingEnabled = side > 64;
          pen.drawImage(image, (image.width - side) / 2, (image.height - side) / 2, side, side, 0, 0, 280, 280);
          resolve();
        };
        image.onerror = () => { problem(new Error("this file is not an image that the browser can show")); reject(); };
        image.src = source;
      }).catch(() => {});
    },
    example(example) { return this.put("data:image/png;base64," + example.image); },
    request() {
      this.url = this.canvas.toDataURL("image/png");
      return { image: this.url.split(",")[1], top_n: Number($("form").elements.top_n.value) };
    },
    show: showResults,
  },

  recommend: {
    build(fields, schema) {
      this.schema = schema;
      const item = schema.properties.history.items;
      this.simple = item.type === "integer";
      this.history = make("ol", { className: "chips" });
      this.history.setAttribute("aria-label", "The history, from old to new");
      const add = make("button", { type: "button", id: "add", textContent: "Add" });
      const entry = make("fieldset", {}, make("legend", {}, this.simple ? "Add to the history" : "Add a journey"));
      if (this.simple) {
        this.item = number("item", item, item.minimum);
        entry.append(make("div", { className: "row" }, make("label", {}, `Item, ${item.minimum} to ${item.maximum} `, this.item), add));
        add.addEventListener("click", () => { if (this.item.reportValidity()) this.append(Number(this.item.value)); });
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
  },

  generate: {
    build(fields, schema) {
      const properties = schema.properties;
      this.prompt = make("textarea", { name: "prompt", maxLength: properties.prompt.maxLength ?? 10000, spellcheck: false });
      const wanted = ["max_tokens", "temperature", "seed"].filter((name) => properties[name]);
      const words = { max_tokens: "Most new tokens ", temperature: "Temperature ", seed: "Seed " };
      fields.append(make("label", {}, "A text to continue ", this.prompt),
        make("div", { className: "row" }, ...wanted.map((name) => make("label", {}, words[name], number(name, properties[name])))));
      this.wanted = wanted;
      this.example(schema.examples[0]);
    },
    example(example) { this.prompt.value = example.prompt; },
    request() {
      const form = $("form").elements, found = { prompt: this.prompt.value };
      for (const name of this.wanted) found[name] = Number(form[name].value);
      return found;
    },
    async run(request, signal) {
      const text = make("p", { id: "text" }, request.prompt);
      $("answer").replaceChildren(text);
      const response = await ask("/v1/generate", { ...request, stream: true }, signal);
      const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
      let rest = "", end = null;
      for (;;) {
        const { value, done } = await reader.read();
        if (done) break;
        const events = (rest + value).split("\n\n");
        rest = events.pop();
        for (const event of events) {
          const [, name, data] = /^event: (\w+)\ndata: (.*)$/s.exec(event);
          const content = JSON.parse(data);
          if (name === "text") text.append(content);
          else if (name === "error") throw new Error(`${content.status}: ${content.message}`);
          else end = content;
        }
      }
      if (!end) throw new Error("the connection ended before the text did");
      if (!model.request.properties.explain) return {};
      // The same request gives the same text: asked again, it also says where its tokens went.
      return (await ask("/v1/generate", { ...request, stream: false, explain: true }, signal)).json();
    },
    show() {},
  },
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
