"use strict";
// A heading is a button, so that a click, Enter and Space all sort. The order is said by aria-sort alone; the arrow
// beside the heading is drawn from it. Rows without a value stay at the end in either direction.
for (const table of document.querySelectorAll("table.sortable")) {
  const headings = [...table.tHead.rows[0].cells];
  headings.forEach((heading, column) => {
    heading.querySelector("button").addEventListener("click", () => {
      const up = heading.getAttribute("aria-sort") !== "ascending";
      const numeric = heading.classList.contains("number");
      const rows = [...table.tBodies[0].rows].map((row) => {
        const value = row.cells[column].dataset.value;
        return { row, value: value === undefined ? null : numeric ? Number(value) : value };
      });
      rows.sort((a, b) => {
        if (a.value === null || b.value === null) return (a.value === null) - (b.value === null);
        const order = numeric ? a.value - b.value : a.value.localeCompare(b.value, undefined, { numeric: true });
        return up ? order : -order;
      });
      table.tBodies[0].append(...rows.map(({ row }) => row));
      for (const other of headings) other.removeAttribute("aria-sort");
      heading.setAttribute("aria-sort", up ? "ascending" : "descending");
    });
  });
}
// A picture wider than the screen moves under the finger; its frame says on which sides there is more of it.
for (const plate of document.querySelectorAll(".plate")) {
  const tell = () => {
    const hidden = { left: plate.scrollLeft, right: plate.scrollWidth - plate.clientWidth - plate.scrollLeft };
    plate.parentElement.dataset.more = Object.keys(hidden).filter((side) => hidden[side] > 2).join(" ");
  };
  plate.addEventListener("scroll", tell, { passive: true });
  new ResizeObserver(tell).observe(plate);
  tell();
}
