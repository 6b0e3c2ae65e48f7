// A form to draw an image or to choose a file; the rest of the page is in serve/.
forms["image"] = {
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
    this.picture = this.canvas.toDataURL("image/png");
    return { image: this.picture.split(",")[1], top_n: Number($("form").elements.top_n.value) };
  },
  show: showResults,
};
