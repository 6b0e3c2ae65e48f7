"use strict";
// Forms: how each is built, what it requests, and how it shows the answer. A task may bring its own, forms["name"], in a
// script beside its code; all others use "schema", which is built from the schema of a request.
//   build(fields, schema)   puts its inputs into the element `fields`
//   example(example)        fills them with an example of the schema
//   request()               returns their values as a request
//   show(answer)            shows the answer in $("answer")
//   run(request, signal)    instead of one request and one answer: shows its progress, returns the answer
//   picture                 the URL of the image, if tokens are its patches
//   spaced                  whether tokens are text, where spaces matter
const forms = {};

function number(name, schema, value) {
  const input = make("input", { type: "number", name, min: schema.minimum ?? "", max: schema.maximum ?? "",
    step: schema.type === "number" ? "any" : 1, value: value ?? schema.default ?? "" });
  input.required = value !== undefined || schema.default !== undefined;
  return input;
}

// An input for a value of this schema: { element, read, write }; `read` returns undefined if it is left out.
function entry(name, schema, required) {
  const label = (input) => make("label", { title: schema.description ?? "" }, name.replaceAll("_", " ") + " ", input);
  const plain = (input, read = (text) => text) => {
    input.required = required;
    return { element: label(input), read: () => (input.value === "" && !required ? undefined : read(input.value)),
      write: (value) => { input.value = value ?? schema.default ?? ""; } };
  };
  if (schema.type === "object" && schema.properties) {
    const inner = entries(schema);
    return { ...inner, element: make("fieldset", {}, make("legend", {}, name), inner.element) };
  }
  if (schema.enum) {
    return plain(make("select", { name }, ...schema.enum.map((word) => make("option", {}, String(word)))));
  }
  if (schema.type === "boolean") {
    const box = make("input", { type: "checkbox", name });
    return { element: label(box), read: () => box.checked, write: (value) => { box.checked = value ?? schema.default ?? false; } };
  }
  if ([schema.type].flat().some((type) => type === "integer" || type === "number")) return plain(number(name, schema), Number);
  if (schema.type === "string") {
    return plain(schema.maxLength > 200 ? make("textarea", { name }) : make("input", { name, maxLength: schema.maxLength ?? 200 }));
  }
  const area = plain(make("textarea", { name, spellcheck: false }), JSON.parse);  // lists and any other types
  const write = area.write;
  return { ...area, write: (value) => write(value === undefined ? undefined : JSON.stringify(value)) };
}

function entries(schema) {
  const names = Object.keys(schema.properties).filter((name) => !["explain", "stream"].includes(name));
  const inputs = names.map((name) => [name, entry(name, schema.properties[name], schema.required?.includes(name) ?? false)]);
  return {
    element: make("div", { className: "grid" }, ...inputs.map(([, input]) => input.element)),
    read: () => Object.fromEntries(inputs.map(([name, input]) => [name, input.read()]).filter(([, value]) => value !== undefined)),
    write: (values) => inputs.forEach(([name, input]) => input.write(values?.[name])),
  };
}

forms["schema"] = {
  build(fields, schema) {
    this.entries = entries(schema);
    fields.append(make("p", { className: "hint", textContent: schema.description ?? "" }), this.entries.element);
    this.example(schema.examples?.[0]);
  },
  example(example) { this.entries.write(example); },
  request() { return this.entries.read(); },
  show(answer) {
    if (answer.results) return showResults(answer);
    const { tokens, blocks, ...rest } = answer;
    const lines = Object.entries(rest).map(([name, value]) =>
      make("p", {}, make("strong", {}, name + ": "), typeof value === "string" ? value : JSON.stringify(value)));
    $("answer").replaceChildren(...lines);
  },
};
