"use strict";
// Shows the grid of bench/report/accountant.py: it picks, multiplies by the number of requests, and divides the memory.
(() => {
  const grid = JSON.parse(document.getElementById("grid").textContent);
  const element = (id) => document.getElementById(`panel-${id}`);
  const GIB = 2 ** 30;
  const bytes = (size) => {
    for (const unit of ["B", "KiB", "MiB", "GiB"]) {
      if (size < 1024) return `${unit === "B" ? Math.round(size) : size.toFixed(1)} ${unit}`;
      size /= 1024;
    }
    return `${size.toFixed(1)} TiB`;
  };
  const count = (value) => value.toLocaleString("en");
  const name = (option) =>
    option.kind === "paged" ? `paged, blocks of ${option.block}`
      : `virtual, ${option.layout}, ${bytes(option.page)}${option.offered ? "" : "*"}`;

  grid.models.forEach((model, i) => element("model").append(new Option(model, i)));
  grid.gpus.forEach((gpus, i) => element("gpus").append(new Option(gpus, i)));
  element("model").value = grid.models.indexOf("Llama-3-8B");
  element("tokens").max = grid.tokens.length - 1;

  function show() {
    const number = (id) => Number(element(id).value);
    const tokens = grid.tokens[number("tokens")], memory = number("memory") * GIB, batch = 2 ** number("batch");
    const said = { tokens: count(tokens), memory: `${number("memory")} GiB`, batch: count(batch) };
    for (const [id, text] of Object.entries(said)) document.querySelector(`output[for=panel-${id}]`).textContent = text;
    const rows = grid.values[number("model")][number("gpus")][number("tokens")].map((row, i) => {
      const value = Object.fromEntries(grid.fields.map((field, j) => [field, row[j]]));
      return { option: grid.options[i], fit: Math.floor(memory / value.held_bytes), ...value };
    });
    const most = Math.max(...rows.map((row) => row.fit), 1);
    element("fits").tBodies[0].replaceChildren(...rows.map((row) => {
      const line = document.createElement("tr");
      line.className = `${row.option.kind} ${row.option.offered ? "" : "missing"}`;
      const bar = document.createElement("div");
      bar.className = "bar";
      bar.style.width = `${(100 * row.fit) / most}%`;
      const cells = [
        name(row.option), count(row.fit), bar,
        `${bytes(row.mean_waste)}, ${((100 * row.mean_waste) / row.held_bytes).toFixed(1)} %`,
        bytes(row.table_bytes * batch),
        row.option.kind === "paged" ? "–" : row.map_calls_per_token.toPrecision(2),
        row.option.kind === "paged" ? "–" : bytes(row.address_bytes * batch),
      ];
      cells.forEach((content) => {
        const cell = line.insertCell();
        cell.append(content);
        if (content === bar) cell.className = "bars";
      });
      return line;
    }));
    const paged = rows.find((row) => row.option.block === 16);
    const offered = rows.filter((row) => row.option.kind === "virtual" && row.option.offered);
    const most_fit = offered.reduce((best, row) => (row.fit > best.fit ? row : best));
    element("answer").textContent =
      `${count(paged.fit)} requests fit in blocks of 16 tokens; of virtual, ${count(most_fit.fit)} with ` +
      `${name(most_fit.option).replace("virtual, ", "layout ")}. ` +
      (Math.min(paged.fit, most_fit.fit) >= batch ? `${count(batch)} at a time fit either way.`
        : Math.max(paged.fit, most_fit.fit) < batch ? `${count(batch)} at a time fit in neither.`
          : `${count(batch)} at a time fit only in ${paged.fit < batch ? "pages" : "blocks"}.`);
  }
  document.getElementById("panel").addEventListener("input", show);
  document.getElementById("panel").addEventListener("submit", (event) => event.preventDefault());
  show();
})();
