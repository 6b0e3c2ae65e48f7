// A form for a text that is continued piece by piece; the rest of the page is in serve/.
forms["text"] = {
  spaced: true,
  build(fields, schema) {
    const properties = schema.properties;
    this.prompt = make("textarea", { name: "prompt", maxLength: properties.prompt.maxLength ?? 10000, spellcheck: false });
    const wanted = ["max_tokens", "temperature", "seed"].filter((name) => properties[name]);
    const words = { max_tokens: "Maximum new tokens ", temperature: "Temperature ", seed: "Seed " };
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
    const response = await ask("/v1/" + model.action, { ...request, stream: true }, signal);
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
    // The same request gives the same text; sent again with explain, it also says where the tokens went.
    return (await ask("/v1/" + model.action, { ...request, stream: false, explain: true }, signal)).json();
  },
  show() {},
};
